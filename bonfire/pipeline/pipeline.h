#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bonfire/base/api.h"
#include "bonfire/comm/mesh.h"
#include "bonfire/pipeline/chain.h"
#include "bonfire/pipeline/executed.h"
#include "bonfire/schedule/schedule.h"
#include "bonfire/shard/engine.h"
#include "bonfire/shard/shares.h"
#include "bonfire/shard/slices.h"

namespace bonfire {

struct PipelineOptions {
  // Who does what in which order: computations at least. Whatever sort of cell it lacks is added (schedule/lowering.h).
  schedule::Schedule schedule{};
  std::string schedule_name = "given";  // for messages
  std::vector<UnitRange> stages{};      // empty: evenly by count
  int receive_ahead = 1;                // computations that a receive is issued before it is needed
  int resident = 2;                     // stages of a rank that are gathered at once, where parameters are sharded
  // Of every stage, over the data-parallel ranks that share it. With reshard_after_forward = true sharded parameters are
  // gathered Unit by Unit, in every forward and backward, `prefetch` of them ahead; otherwise stage by stage.
  ShardOptions shard{};
  // A microbatch such as will come, whatever is in it. With it the stages agree on what crosses the cuts when the pipeline
  // is made, and what cannot be is refused there; without it, in the first step.
  std::optional<Microbatch> example{};
};

// The table that a pipeline with these options runs on `data` ranks per stage of which `shard` share its state. Throws
// ConfigError where there cannot be one: more stages than Units, a table that cannot run. Needs no ranks, so mistakes are
// found before anything starts.
struct DataRanks {
  int replicate = 1;
  int shard = 1;
};
BONFIRE_API schedule::Schedule pipeline_table(const Chain& chain, const PipelineOptions& options, const DataRanks& ranks);

// A step, or an evaluation, as all ranks hear of it.
struct PipelineReport {
  double loss = 0;                // mean over the microbatches of this pipeline, by their weights; 0 where none has any
  double weight = 0;              // of all of them together
  std::vector<double> reports{};  // the same of what the last stage returned behind it
};

// A model cut into stages over the pipeline axis of a mesh. Each stage has an Engine over the replicate and shard axes;
// a schedule drives them all. An optimizer of a pipeline updates all its stages.
class BONFIRE_API Pipeline : public Shares, public Sliced {
 public:
  // Builds this rank's stages and connects it with its neighbours. Throws ConfigError, the same on all ranks, where the
  // model or the schedule cannot be had. Collective over the mesh.
  Pipeline(const Mesh& mesh, Chain chain, PipelineOptions options);
  ~Pipeline() override;
  Pipeline(Pipeline&&) noexcept;
  Pipeline& operator=(Pipeline&&) noexcept;

  struct RunOptions {
    double loss_scale = 1;                    // gradients are those of so many times the mean loss
    std::function<void(int stage)> update{};  // called in update cells of this rank's stages
    CellObserver observe{};
  };
  // Runs the table: afterwards the gradients in the engines are those of the mean loss. Where microbatches have weights it
  // is the mean over all that data-parallel ranks have, by weight, and costs an all-reduce of one number; otherwise the
  // average of the ranks' means over their samples. The first step agrees on what crosses the cuts, where no example has.
  // Microbatches may differ in size. Collective.
  PipelineReport step(const std::vector<Microbatch>& microbatches, const RunOptions& options);
  PipelineReport step(const std::vector<Microbatch>& microbatches) { return step(microbatches, {}); }
  // Forwards alone, of any number of microbatches, which may differ in size from those of a step. Collective.
  PipelineReport evaluate(const std::vector<Microbatch>& microbatches);

  const schedule::Schedule& table() const;
  const std::vector<UnitRange>& stages() const;
  const std::vector<int>& local_stages() const;  // this rank's, in order
  Engine& engine(int stage);                     // of a local one
  torch::nn::Module& module(int stage);

  // Of the last step or evaluation.
  const std::vector<ExecutedCell>& executed() const;
  int peak_activations() const;     // forwards of this rank whose backward had not ended, at most
  std::int64_t pool_bytes() const;  // of buffers for messages

  // Of all stages on this rank, by their paths in the whole model: a stage's module must have its parameters under the paths
  // that they have in a module of all Units. A tied weight has the path of the first of its Units.
  std::vector<Slice> slices() override;
  void slices_written() override;

  // For optimizers: see Shares.
  std::vector<Part> parts() const override;
  std::int64_t layout_version() const override;
  Division division() const override;
  at::Device device() const override;
  void sum(at::Tensor& numbers) const override;
  void require_gradients() const override;
  void spend_gradients(const GradientUse& use = {}) override;
  void updated(std::size_t part) override;
  void finish_update() override;

  struct State;

 private:
  std::unique_ptr<State> state_;
};

}  // namespace bonfire
