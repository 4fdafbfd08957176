#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "bonfire/base/clock.h"
#include "bonfire/comm/world.h"
#include "bonfire/data/source.h"
#include "bonfire/pipeline/pipedream.h"
#include "bonfire/schedule/pipedream.h"
#include "bonfire/train/config.h"
#include "bonfire/train/trainee.h"

namespace bonfire {

// Whether layout.schedule is one of PipeDream's.
BONFIRE_API bool runs_pipedream(const Config& config);
// Stages, replicas and microbatches as the keys say. REQUIRES: runs_pipedream(), and the batch is resolved.
BONFIRE_API schedule::RoundRobin robin_of(const Config& config);
// Where they were not given: train.steps and checkpoint.every become whole rounds of all replicas.
void resolve_rounds(Config& config);
// Throws ConfigError where a run cannot go on from this step of a checkpoint: the pipeline, which is empty there, is never
// again when the run ends.
BONFIRE_API void require_whole_rounds(const Config& config, std::int64_t step, const std::string& checkpoint);
// The keys of a run of PipeDream's against each other. Throws ConfigError. REQUIRES: as above, and the model is resolved.
BONFIRE_API void check_pipedream(const Config& config);
// layout.replicas, layout.stash and checkpoint.drain without such a schedule. Throws ConfigError.
BONFIRE_API void check_no_pipedream(const Config& config);

// Every rank has a replica of a stage of the model. A step is a minibatch: it begins when the minibatch is admitted, and
// other steps begin before its updates are made.
class BONFIRE_API PipeDreamModel final : public Trainee {
 public:
  // `source`: samples such as will come. Collective.
  PipeDreamModel(const World& world, const Config& config, const Mesh& mesh, const Source& source);

  at::Tensor forward_backward(const std::vector<Batch>& microbatches, const StepContext& context) override;
  std::shared_ptr<StepReading> whole_step(const std::vector<Batch>& microbatches, const StepContext& context,
                                          const StepOptions& options) override;
  StepResult update(const StepOptions& options) override;
  void spend_gradients() override { pipeline_.spend_gradients(); }
  void set_lr(double lr) override { lr_ = lr; }
  at::Tensor evaluate(const std::vector<Batch>& microbatches, std::size_t counted) override;
  Sliced* parameters() override { return &pipeline_; }
  std::vector<Sliced*> state() override { return {&pipeline_, optimizer_.get()}; }
  bool overlaps() const override { return true; }
  int readings_behind() const override { return 2 * pipeline_.minibatches_on_their_way() + 1; }
  bool can_drain() const override { return pipeline_.can_drain(); }
  void drain() override;
  void on_step_made(std::function<void(std::int64_t step)> made) override { on_step_made_ = std::move(made); }
  std::optional<Overlap> overlap() const override;

  PipeDream& pipeline() { return pipeline_; }

 private:
  class Reading;
  // What a rank knows of a minibatch, and what all do.
  struct Notes;

  void note(const StageUpdate& update);
  // How long the last admission took.
  void keep_pace(double seconds);
  // Tells the others of all minibatches before this one that were not told yet.
  void tell_until(std::int64_t minibatch);

  World world_;
  Group readings_;
  std::shared_ptr<std::int64_t> rollbacks_ = std::make_shared<std::int64_t>(0);
  PipeDream pipeline_;
  std::unique_ptr<Optimizer> optimizer_;
  double lr_ = 0;
  std::deque<Nanoseconds> ended_;  // the last admissions, a round and one more
  StepOptions options_{};
  std::int64_t first_step_ = 0;                           // of minibatch 0
  std::int64_t told_ = 0;                                 // minibatches
  std::map<std::int64_t, double> lrs_;                    // of minibatches that have not been updated with
  std::map<std::int64_t, std::shared_ptr<Notes>> notes_;  // of minibatches that have not been told
  std::shared_ptr<Notes> newest_;
  std::function<void(std::int64_t step)> on_step_made_;
  // What filling the pipeline again costs.
  struct Pace {
    std::int64_t since_empty = 0;  // minibatches
    double drain_seconds = 0;      // of the last drain, until something is admitted after it
    std::int64_t fills = 0;        // after a drain
    std::int64_t filling = 0, full = 0;
    double filling_seconds = 0, full_seconds = 0;  // of so many minibatches; those of filling with the drain before
  } pace_;
  Overlap overlap_;
};

}  // namespace bonfire
