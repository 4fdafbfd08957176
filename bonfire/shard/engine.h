#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "bonfire/base/api.h"
#include "bonfire/base/log.h"
#include "bonfire/base/trace.h"
#include "bonfire/comm/mesh.h"
#include "bonfire/plan/layout.h"
#include "bonfire/plan/sharding.h"
#include "bonfire/shard/flat_parameter.h"
#include "bonfire/shard/reduction.h"
#include "bonfire/shard/wrap.h"

namespace torch::nn {
class Module;
}

namespace bonfire {

struct EngineMemory;

using plan::Accumulation;
using plan::BackwardPrefetch;
using plan::Offload;
using plan::Sharded;

// What happens to parameters that differ between ranks when training starts.
enum class Start {
  check,      // an error that names the first one
  broadcast,  // rank 0's values, and its buffers', are sent to all
};

// When a Unit's memory goes out between forward and backward.
struct ReshardAfterForward {
  ReshardAfterForward(bool free = true) : free(free) {}
  ReshardAfterForward(int to_ranks) : free(true), ranks(to_ranks) {}
  bool free;
  // More than 0: each rank keeps the share of it that groups of so many ranks need to gather it again among themselves.
  int ranks = 0;
};

// In which number formats a model is trained. What is not said keeps the parameters' own.
struct Precision {
  std::optional<at::ScalarType>
      parameters{};  // of forward and backward; masters and optimizer state keep the parameters' own
  std::optional<at::ScalarType> gradients{};  // kept until the update; masters' unless said
  std::optional<at::ScalarType> reduction{};  // on their way between ranks; as they are kept unless said
  std::optional<at::ScalarType> outputs{};    // of the whole model
  std::optional<at::ScalarType> buffers{};    // floating-point buffers of the module
  // Parameters that forward reads in their own type all the same: norms, embeddings.
  std::function<bool(const std::string& name, const at::Tensor& parameter)> keep{};
  // Trained weights that forward reads in eight bits (e4m3), and how many scales go with each: 1, or one for each row; 0: it
  // is none of them. Scales are found anew in every update. Their layers make their products in fp8 (LinearImpl::set_fp8).
  std::function<std::int64_t(const std::string& name, const at::Tensor& parameter)> scales{};
  bool scaled_loss = false;  // a gradient scaler is used; fp16 needs one
};

struct ShardOptions {
  Sharded what = Sharded::none;
  Precision precision{};
  ReshardAfterForward reshard_after_forward = true;
  int prefetch = 2;  // Units that are gathered ahead of the one that runs
  BackwardPrefetch backward_prefetch = BackwardPrefetch::before_reduction;
  Accumulation accumulation = Accumulation::sharded;
  Offload offload = Offload::none;
  Wrapping wrapping{};
  Start start = Start::broadcast;
  plan::BucketOptions buckets{};
  ReductionOptions reduction{};
  std::shared_ptr<Reduction> hook{};  // instead of `reduction`: a user's own, over the replicas
  // Ranks may run out of data at different steps; see Engine::finish. Costs one small all-reduce a step.
  bool uneven_inputs = false;
  bool keep_buffers_equal = true;  // rank 0's module buffers are sent to all after each step's backward
  // Units may run in an order, or a number, that differs between ranks or steps at random: every gather is agreed on first.
  // Without it that is done in the first step and whenever a rank needs what the order of the first one does not have.
  bool negotiate_order = false;
  // How long a host waits for other ranks to reduce what it has before it goes on with more memory: they may wait for it,
  // where they run Units in another order.
  std::chrono::milliseconds patience{5000};
  // Whoever runs the module says when parameters come and go and when gradients are reduced, instead of the seams and
  // Engine::backward: a pipeline, whose schedule decides both. See Engine::unshard.
  bool driven = false;
  // With `driven`: buffers that this engine shares with others whose modules the same schedule runs; its own unless said.
  std::shared_ptr<EngineMemory> memory{};
  bool debug = false;  // tensors that pass a seam are checked: none may lie in a parameter whose memory is out
  Log log{};
  Trace* trace = nullptr;
};

struct BackwardOptions {
  bool retain_graph = false;  // there will be another backward through the same forward
};

// Data parallelism over one module. Parameters stay the user's own tensors; backward goes through here, so that gradients
// are averaged over the ranks while it still runs.
class BONFIRE_API Engine {
 public:
  Engine(const Mesh& mesh, torch::nn::Module& module, ShardOptions options);
  ~Engine();
  Engine(Engine&& other) noexcept;
  Engine& operator=(Engine&& other) noexcept;

  // Adds the gradients of `loss` to those accumulated so far: for all microbatches of a step but the last. Collective where
  // gradients or parameters are kept as shares; otherwise without communication.
  void accumulate(const at::Tensor& loss, const BackwardOptions& how = {});
  // The same for the last microbatch, or the only one: afterwards gradients are the average over the ranks of what each has
  // accumulated. Collective. Where it throws, on all ranks alike, the gradients of the step are lost. Once a step where
  // gradients or optimizer state are sharded.
  void backward(const at::Tensor& loss, const BackwardOptions& how = {});
  // For a rank that has run out of data (`uneven_inputs`): takes part in the others' steps until they end too, calling
  // `step` (normally the optimizer's) after each, so that its parameters stay equal. Gradients are averaged over the ranks
  // that still had data. Collective.
  void finish(const std::function<void()>& step);

  // Throws unless the gradients are those of a whole step that no update has used yet. Optimizers of ours ask before they
  // change anything.
  void require_gradients() const;
  // The gradients have been used: the next backward starts from nothing. Optimizers of ours call it.
  void spend_gradients(const GradientUse& use = {});
  // The shares of flat parameter `flat` were updated: where others hold copies of them these are sent, while the caller goes
  // on with the next. `finish_update` ends that, and rounds what has scales. Optimizers of ours call both. Collective.
  void updated(std::size_t flat);
  void finish_update();

  // --- For a module that is run by a schedule (`driven`), in place of accumulate and backward.
  // A step begins: what was frozen or thawed since the last one moves. Collective where something was.
  void begin_step();
  // Begins to gather all parameters; nothing where they are always in. Collective.
  void unshard();
  // Stream: the current one waits until they are there.
  void await_parameters();
  void reshard();
  struct GradientPass {
    bool reduces = true;  // these are the last gradients before a reduction, which begins with whatever is complete
    bool last = true;     // and that is the last one of the step
  };
  // Between the two, gradients that autograd accumulates are added to those of the step. With `reduces`, all that is to be
  // reduced is on its way at the end. Collective then.
  void begin_gradients(const GradientPass& pass);
  void end_gradients();
  // Waits for the reductions of the step. Collective.
  void finish_gradients();
  // Something threw inside of a step, and said why: its gradients are lost.
  void abandon_gradients(const std::string& why);

  // --- For steps that are captured.
  // Around a capture, before and after: what was issued before it has ended, and what it issues has not been done, so that
  // neither side need wait for the other's use of memory.
  void forget_uses();
  // Something threw inside of a capture: the step has not been.
  void abandon_step();

  // A scope in which all parameters are whole and can be read through the module, in the type that forward reads. With
  // `write`, what was changed is kept; every rank must make the same change. Collective when it begins.
  class BONFIRE_API FullParameters {
   public:
    ~FullParameters();
    FullParameters(FullParameters&&) noexcept;

   private:
    friend class Engine;
    struct Stay;
    explicit FullParameters(std::unique_ptr<Stay> stay);
    std::unique_ptr<Stay> stay_;
  };
  [[nodiscard]] FullParameters full_parameters(bool write = false);

  // Ends the engine: the module's parameters are ordinary tensors again, whole and in their own type, and it can be run,
  // saved, or given to shard() once more without this engine. An engine that is destroyed instead leaves sharded parameters
  // without memory. Optimizers of this engine cannot step any more. Collective.
  void release();

  // Collective: throws where a parameter differs between ranks that should hold the same, naming it.
  void check_equal() const;

  const Mesh& mesh() const;
  const ShardOptions& options() const;
  const plan::Factors& factors() const;
  std::vector<std::unique_ptr<FlatParameter>>& flats();
  const std::vector<std::unique_ptr<FlatParameter>>& flats() const;
  // Changes when parameters move to other flat buffers: after the first backward, which teaches the order, and when some
  // were frozen or thawed.
  std::int64_t layout_version() const;
  // Bytes that the pool of gathered parameters and the one of whole gradients hold on this rank: with ShardOptions::memory,
  // for all engines that share it.
  std::int64_t pool_bytes() const;
  // How long the host was inside the engine's own work at seams and gradients' arrivals, since it was made.
  double host_seconds() const;

  struct State;

 private:
  friend class EngineRef;
  std::shared_ptr<State> state_;
};

// The one line that makes a program data parallel. `module` is a torch::nn::Module, or a holder or pointer of one.
BONFIRE_API Engine shard(const Mesh& mesh, torch::nn::Module& module, ShardOptions options = {});

template <class Holder>
requires requires(Holder& holder) { static_cast<torch::nn::Module&>(*holder); }
Engine shard(const Mesh& mesh, Holder& holder, ShardOptions options = {}) {
  return shard(mesh, static_cast<torch::nn::Module&>(*holder), std::move(options));
}

}  // namespace bonfire
