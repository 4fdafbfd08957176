#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "bonfire/base/api.h"
#include "bonfire/base/trace.h"
#include "bonfire/comm/mesh.h"
#include "bonfire/plan/layout.h"
#include "bonfire/shard/flat_parameter.h"
#include "bonfire/shard/reduction.h"

namespace torch::nn {
class Module;
}

namespace bonfire {

// What is divided among the ranks of a shard group. With a sharding factor of 1 nothing is, whatever this says.
enum class Sharded { none, optimizer, gradients, parameters };

// What happens to parameters that differ between ranks when training starts.
enum class Start {
  check,      // an error that names the first one
  broadcast,  // rank 0's values are sent to all
};

struct ShardOptions {
  Sharded what = Sharded::none;
  // The dtype of forward and backward; masters, gradients and optimizer state keep the parameters' own.
  std::optional<at::ScalarType> compute{};
  Start start = Start::check;
  plan::BucketOptions buckets{};
  ReductionOptions reduction{};
  std::shared_ptr<Reduction> hook{};  // instead of `reduction`: a user's own
  // Ranks may run out of data at different steps; see Engine::finish. Costs one small all-reduce a step.
  bool uneven_inputs = false;
  bool keep_buffers_equal = true;  // rank 0's module buffers are sent to all after each step's backward
  Trace* trace = nullptr;
};

// Data parallelism over one module. Parameters stay the user's own tensors; backward goes through here, so that gradients
// are averaged over the ranks while it still runs.
class BONFIRE_API Engine {
 public:
  Engine(const Mesh& mesh, torch::nn::Module& module, ShardOptions options);
  ~Engine();
  Engine(Engine&&) noexcept;
  Engine& operator=(Engine&&) noexcept;

  // Adds the gradients of `loss` to those accumulated so far, without communication: for all microbatches of a step but
  // the last.
  void accumulate(const at::Tensor& loss);
  // The same for the last microbatch, or the only one: afterwards every parameter's .grad is the average over the ranks of
  // what each has accumulated. Collective.
  void backward(const at::Tensor& loss);
  // For a rank that has run out of data (`uneven_inputs`): takes part in the others' steps until they end too, calling
  // `step` (normally the optimizer's) after each, so that its parameters stay equal. Gradients are averaged over the ranks
  // that still had data. Collective.
  void finish(const std::function<void()>& step);

  // The gradients have been used: the next backward starts from nothing. Optimizers of ours call it.
  void spend_gradients(const GradientUse& use = {});
  // Collective: throws where a parameter differs between ranks, naming it.
  void check_equal() const;

  const Mesh& mesh() const;
  std::vector<std::unique_ptr<FlatParameter>>& flats();
  const std::vector<std::unique_ptr<FlatParameter>>& flats() const;
  // Changes when parameters move to other flat buffers: after the first backward, which teaches the order, and when some
  // were frozen or thawed.
  std::int64_t layout_version() const;

  struct State;

 private:
  std::unique_ptr<State> state_;
};

// The one line that makes a program data parallel. `module` is a torch::nn::Module, or a holder or pointer of one.
BONFIRE_API Engine shard(const Mesh& mesh, torch::nn::Module& module, ShardOptions options = {});

template <class Holder>
requires requires(Holder& holder) { static_cast<torch::nn::Module&>(*holder); }
Engine shard(const Mesh& mesh, Holder& holder, ShardOptions options = {}) {
  return shard(mesh, static_cast<torch::nn::Module&>(*holder), std::move(options));
}

}  // namespace bonfire
