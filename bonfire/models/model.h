#pragma once

#include <memory>
#include <string>
#include <vector>

#include <torch/nn/module.h>

#include "bonfire/base/api.h"
#include "bonfire/nn/context_attention.h"
#include "bonfire/nn/dropout_state.h"
#include "bonfire/nn/sequence_regions.h"
#include "bonfire/plan/model.h"

namespace bonfire {

class HostInputs;

// A Unit in the chain of a model: takes what the one before it gives.
class BONFIRE_API Layer : public torch::nn::Module {
 public:
  virtual at::Tensor forward(at::Tensor x) = 0;
};

// The last Unit: the logits of x, or with a target the mean loss over it.
class BONFIRE_API Head : public torch::nn::Module {
 public:
  virtual at::Tensor forward(at::Tensor x, at::Tensor target) = 0;
};

// (Part of) a parameter under the name that others know it by.
struct PublicParameter {
  std::string name;    // "model.layers.0.self_attn.q_proj.weight"
  at::Tensor tensor;   // a view of the parameter, in the public layout (transposed where that is)
  std::string inside;  // path of the parameter in the model
};

// A model is a chain of Units, built from its description; the model is a Unit too. A description of a part (plan::part_of)
// makes a part, which may lack its embedding or its head. `forward` and all Units can be called
// through these base classes: the seams are passed all the same.
class BONFIRE_API Model : public torch::nn::Module {
 public:
  // Logits; with a target, the mean loss over it: fp32, or fp64 for an fp64 model. Of a part without head: what the next one
  // takes. Where ranks share samples, input and target have all positions, logits are those of the rank's own, and the loss
  // is such that its mean over the ranks is that over all targets.
  virtual at::Tensor forward(at::Tensor input, at::Tensor target = {}) = 0;
  at::Tensor loss(const at::Tensor& input, const at::Tensor& target) { return forward(input, target); }

  const plan::ModelDescription& description() const { return description_; }
  // All Units but the head, in forward order, and the head (null in a part without): what a pipeline cuts.
  const std::vector<std::shared_ptr<Layer>>& layers() const { return layers_; }
  const std::shared_ptr<Head>& head() const { return head_; }

  // Says which step and which samples the next forward belongs to. Only dropout asks. `train` and `eval` of the module
  // switch dropout on and off.
  void set_dropout(std::uint64_t step, std::int64_t first_sample);
  // Says which documents the samples of the next forward consist of: `starts` [samples, positions] (see Batch::documents) on
  // the CPU. Undefined: each sample is one. Only llama and gpt2 ask.
  void set_documents(const at::Tensor& starts);
  DropoutState& dropout_state() { return *dropout_; }
  void train(bool on = true) override;

  // Every parameter by its public names, in the order of the description. A tied weight appears once. REQUIRES: no rank has
  // other parts of its layers.
  std::vector<PublicParameter> public_parameters() const;

 protected:
  plan::ModelDescription description_;
  std::vector<std::shared_ptr<Layer>> layers_;
  std::shared_ptr<Head> head_;
  std::shared_ptr<DropoutState> dropout_ = std::make_shared<DropoutState>();
};

struct BuildOptions {
  std::uint64_t seed = 1;
  at::ScalarType dtype = at::kFloat;
  at::Device device = at::kCPU;
  // Those that have the other parts of the layers, where the description is of one part. With its `sequence` the input and
  // the target still have all positions.
  TensorRanks tensor{};
  // Those that share its samples.
  ContextRanks context{};
  // Where recomputed blocks keep their inputs, if not on the device.
  std::shared_ptr<HostInputs> host_inputs{};
};

// The weights are a function of the seed and of each weight's public name, and of nothing else. Throws ConfigError for a
// spec that cannot be.
BONFIRE_API std::shared_ptr<Model> build_model(const plan::ModelSpec& spec, const BuildOptions& options);
// The same of a description, in which some parameters may not be trained.
BONFIRE_API std::shared_ptr<Model> build_model(plan::ModelDescription description, const BuildOptions& options);

}  // namespace bonfire
