#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "bonfire/base/api.h"
#include "bonfire/base/log.h"
#include "bonfire/base/trace.h"
#include "bonfire/comm/data_groups.h"
#include "bonfire/plan/layout.h"
#include "bonfire/plan/sharding.h"
#include "bonfire/shard/flat_parameter.h"
#include "bonfire/shard/reduction.h"
#include "bonfire/shard/shares.h"
#include "bonfire/shard/slices.h"
#include "bonfire/shard/wrap.h"

namespace torch::nn {
class Module;
}

namespace bonfire {

using plan::Accumulation;
using plan::BackwardPrefetch;
using plan::Offload;
using plan::Sharded;

// What happens to parameters that differ between ranks when training starts.
enum class Start {
  check,      // an error that names the first one
  broadcast,  // rank 0's values, and its buffers', are sent to all
};

// Whether a Unit's memory is freed between forward and backward. In a pipeline: whether Units are gathered one by one, for
// each microbatch and direction anew, or whole stages, when the schedule says so.
struct ReshardAfterForward {
  ReshardAfterForward() = default;  // free; in a pipeline whole stages
  ReshardAfterForward(bool free) : free(free), said(true) {}
  ReshardAfterForward(int to_ranks) : ranks(to_ranks), said(true) {}
  bool free = true;
  // More than 0: each rank keeps the share of it that groups of so many ranks need to gather it again among themselves.
  int ranks = 0;
  bool said = false;
};

// In which number formats a model is trained. Unset fields keep the parameters' own.
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

// Options of a single Unit. Unset fields are as ShardOptions says for all Units.
struct UnitOptions {
  std::optional<at::ScalarType> parameters{};   // as Precision::parameters
  std::optional<bool> reshard_after_forward{};  // where Units are gathered one by one
};

struct ShardOptions {
  Sharded what = Sharded::none;
  Precision precision{};
  ReshardAfterForward reshard_after_forward{};
  int prefetch = 2;  // Units that are gathered ahead of the one that runs
  BackwardPrefetch backward_prefetch = BackwardPrefetch::before_reduction;
  Accumulation accumulation = Accumulation::sharded;
  Offload offload = Offload::none;
  Wrapping wrapping{};
  // Asked once for every Unit of the wrapping that has parameters of its own, by its path; the root's is empty.
  std::function<UnitOptions(const std::string& path, torch::nn::Module& module)> unit{};
  // Of a module that is a part of a model: what its parameters are there. Pipelines say it of their stages by themselves.
  std::function<plan::Placement(const std::string& name, const at::Tensor& parameter)> placement{};
  Start start = Start::broadcast;
  plan::BucketOptions buckets{};
  ReductionOptions reduction{};
  std::shared_ptr<Reduction> hook{};  // instead of `reduction`: a user's own, over the replicas
  // Ranks may run out of data at different steps; see Engine::finish. Costs one small all-reduce a step.
  bool uneven_inputs = false;
  // How many versions of the parameters are kept. More than 1: an update writes a new one, and a backward that comes after
  // it reads the one that its forward has read. Each is as large as what a rank holds of the parameters; masters lie apart.
  int versions = 1;
  bool keep_buffers_equal = true;  // rank 0's module buffers are sent to all after each step's backward
  // Units may run in an order, or a number, that differs between ranks or steps at random: every gather is agreed on first.
  // Not in a pipeline, whose schedule is the same on all ranks.
  // Without it that is done in the first step and whenever a rank needs what the order of the first one does not have.
  bool negotiate_order = false;
  // How long a host waits for other ranks to reduce what it has before it goes on with more memory: they may wait for it,
  // where they run Units in another order.
  std::chrono::milliseconds patience{5000};
  // Tensors that go into Units and come out of them are checked: none may lie in a parameter whose memory is freed.
  bool debug = false;
  Log log{};
  Trace* trace = nullptr;
};

struct BackwardOptions {
  bool retain_graph = false;  // there will be another backward through the same forward
  at::Tensor gradient{};      // of what backward begins with, where that is not one number: of its shape
};

// Data parallelism over one module. Parameters stay the user's own tensors; backward goes through here, so that gradients
// are averaged over the ranks while it still runs.
class BONFIRE_API Engine : public Shares, public Sliced {
 public:
  // Over a mesh, or over any groups of ranks. Collective among them.
  Engine(const DataGroups& groups, torch::nn::Module& module, ShardOptions options);
  ~Engine() override;
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
  void require_gradients() const override;
  // The gradients have been used: the next backward starts from nothing. Optimizers of ours call it.
  void spend_gradients(const GradientUse& use = {}) override;
  // The shares of flat parameter `flat` were updated: where others hold copies of them these are sent, while the caller goes
  // on with the next. `finish_update` ends that, and rounds what has scales. Optimizers of ours call both. Collective.
  void updated(std::size_t flat) override;
  void finish_update() override;
  std::vector<Part> parts() const override;
  Division division() const override;
  at::Device device() const override;
  void sum(at::Tensor& numbers) const override;

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

  // The values of all parameters, masters where there are any, and the module's buffers, by name.
  std::vector<Slice> slices() override;
  void slices_written() override;

  // Collective: throws where a parameter differs between ranks that should hold the same, naming it.
  void check_equal() const;

  const DataGroups& groups() const;
  const ShardOptions& options() const;
  const plan::Factors& factors() const;
  std::vector<std::unique_ptr<FlatParameter>>& flats();
  const std::vector<std::unique_ptr<FlatParameter>>& flats() const;
  // Changes when parameters move to other flat buffers: after the first backward, which teaches the order, and when some
  // were frozen or thawed.
  std::int64_t layout_version() const override;
  // Bytes that the pool of gathered parameters and the one of whole gradients hold on this rank; in a pipeline, for all
  // stages of this rank.
  std::int64_t pool_bytes() const;
  // How long the host was inside the engine's own work at seams and gradients' arrivals, since it was made.
  double host_seconds() const;

  struct State;

 private:
  friend class ScheduleDriver;
  friend BONFIRE_API void backward(const std::vector<Engine*>&, const at::Tensor&, const BackwardOptions&);
  friend BONFIRE_API void accumulate(const std::vector<Engine*>&, const at::Tensor&, const BackwardOptions&);
  static void run_backward(const std::vector<Engine*>& engines, const at::Tensor& loss, bool last,
                           const BackwardOptions& how);
  explicit Engine(std::shared_ptr<State> state) : state_(std::move(state)) {}
  std::shared_ptr<State> state_;
};

// One backward through a graph that the modules of several engines have built together, such as a generator and a
// discriminator: it does to each of them what its own backward or accumulate would. Name all whose parameters the graph
// needs, in the order in which they run in forward: their gradients are reduced in the reverse order. Collective: the same
// engines on all ranks; with sharded parameters they run the same Units in the same order there.
BONFIRE_API void backward(const std::vector<Engine*>& engines, const at::Tensor& loss, const BackwardOptions& how = {});
BONFIRE_API void accumulate(const std::vector<Engine*>& engines, const at::Tensor& loss, const BackwardOptions& how = {});

// The one line that makes a program data parallel. `groups`: a Mesh, or groups of its own kind. `module` is a
// torch::nn::Module, or a holder or pointer of one.
BONFIRE_API Engine shard(const DataGroups& groups, torch::nn::Module& module, ShardOptions options = {});

template <class Holder>
requires requires(Holder& holder) { static_cast<torch::nn::Module&>(*holder); }
Engine shard(const DataGroups& groups, Holder& holder, ShardOptions options = {}) {
  return shard(groups, static_cast<torch::nn::Module&>(*holder), std::move(options));
}

}  // namespace bonfire
