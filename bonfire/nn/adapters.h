#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include "bonfire/base/api.h"
#include "bonfire/nn/dropout_state.h"
#include "bonfire/nn/gradient_slots.h"

// Low-rank adapters (LoRA): beside a product whose weight is frozen, two thin matrices are trained. The product's result
// becomes x W^T + alpha / rank * dropout(x) A^T B^T. B begins with zeros, so that nothing has changed at first.
namespace bonfire {

namespace nn {

// Of rows [begin, begin + b.size(0)) of a weight.
struct AdapterPart {
  std::string name{};
  at::Tensor a{};  // [rank, in]
  at::Tensor b{};  // [rows, rank]
  std::int64_t begin = 0;
  Dropout dropout{};  // of what it reads
};

class BONFIRE_API AdapterImpl : public torch::nn::Module, public GradientSlots {
 public:
  explicit AdapterImpl(AdapterPart part);
  std::shared_ptr<GradientSink>* slot(const at::Tensor& parameter) override;
  const AdapterPart& part() const { return part_; }
  const std::shared_ptr<GradientSink>& a_sink() const { return a_sink_; }
  const std::shared_ptr<GradientSink>& b_sink() const { return b_sink_; }

 private:
  AdapterPart part_;
  std::shared_ptr<GradientSink> a_sink_, b_sink_;
};
TORCH_MODULE(Adapter);

// All of one weight, under their names.
class BONFIRE_API AdaptersImpl : public torch::nn::Module {
 public:
  AdaptersImpl(std::vector<AdapterPart> parts, double scale);
  // y plus what they make of x, in the memory of y.
  at::Tensor add_to(const at::Tensor& y, const at::Tensor& x) const;

 private:
  std::vector<Adapter> adapters_;
  double scale_;
};
TORCH_MODULE(Adapters);

}  // namespace nn

struct AdapterOptions {
  std::int64_t rank = 8;
  double alpha = 16;  // what an adapter adds is scaled by alpha / rank
  double dropout = 0;
  // Where the run is, for dropout: see DropoutState. Needed where something is dropped.
  std::shared_ptr<DropoutState> state{};
  // Which layers, by their path in the module: the whole of it or its end, from a dot on; * stands for any letters between
  // two dots. Empty: all.
  std::vector<std::string> match{};
  std::uint64_t seed = 1;  // A is a function of it and of the layer's path
};

// torch's Linear that can get an adapter: in place of torch::nn::Linear, with the same options, parameters and names. Until
// then it is the same.
class BONFIRE_API AdaptableLinearImpl : public torch::nn::LinearImpl {
 public:
  using torch::nn::LinearImpl::LinearImpl;
  AdaptableLinearImpl(std::int64_t in, std::int64_t out) : LinearImpl(in, out) {}

  at::Tensor forward(const at::Tensor& x);
  // Adds an adapter, `adapter.a` and `adapter.b` among its parameters, and freezes its own. `path` names the layer in the
  // model, for the first values of A and for dropout.
  void adapt(const AdapterOptions& options, const std::string& path);
  bool adapted() const { return !adapter_.is_empty(); }
  // The weight with what the adapter adds in it: [out, in].
  at::Tensor merged_weight() const;

 private:
  nn::Adapter adapter_{nullptr};
  double scale_ = 1;
};
TORCH_MODULE(AdaptableLinear);

// Gives every AdaptableLinear of the module that `options.match` names an adapter, and freezes all other parameters. Before
// shard(). Returns the paths of these layers. Throws ConfigError where a pattern names none, and says which there are.
BONFIRE_API std::vector<std::string> add_adapters(torch::nn::Module& module, const AdapterOptions& options);

}  // namespace bonfire
