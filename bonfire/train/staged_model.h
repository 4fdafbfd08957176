#pragma once

#include <memory>
#include <vector>

#include "bonfire/comm/world.h"
#include "bonfire/data/source.h"
#include "bonfire/pipeline/pipeline.h"
#include "bonfire/train/config.h"
#include "bonfire/train/trainee.h"

namespace bonfire {

// The model of a configuration as a chain of Units. `rollbacks`: see Trainee::StepContext; it changes from step to step.
BONFIRE_API Chain chain_of(const Config& config, const World& world, const Mesh& mesh,
                           std::shared_ptr<const std::int64_t> rollbacks);
// Its Units and its ties alone.
Chain units_of(const plan::ModelDescription& model);
// On the device of this rank.
std::vector<Microbatch> to_microbatches(const std::vector<Batch>& batches, const World& world);
// A microbatch of samples of zeros: tokens, classes and numbers that every model takes.
Microbatch example_of(const Config& config, const Source& source, const World& world);
// The chain as it is measured: Units that compute in the type that they will, without an engine.
struct UnitsToMeasure {
  Chain chain;
  Microbatch example;
};
UnitsToMeasure units_to_measure(const Config& config, const World& world, const Mesh& mesh, const Source& source);
// The table of layout.schedule, by its name or from its file: computations alone, or whatever the file has. Throws
// ConfigError.
BONFIRE_API schedule::Schedule schedule_of(const Config& config);
// The cut of layout.stages; evenly where it is yet to be measured. Throws ConfigError. REQUIRES: the model is resolved.
BONFIRE_API std::vector<UnitRange> stages_of(const Config& config, int stages);
// Where layout.stages is to be measured: it is, and becomes the list of what came out. Collective.
BONFIRE_API void settle_stages(Config& config, const World& world, const Mesh& mesh, const Source& source);
// The table that runs. Throws ConfigError where there cannot be one. REQUIRES: the model and the batch are resolved.
BONFIRE_API schedule::Schedule table_of(const Config& config);

// Every rank has stages of the model, which a schedule drives.
class BONFIRE_API StagedModel final : public Trainee {
 public:
  // `source`: samples such as will come. Collective.
  StagedModel(const World& world, const Config& config, const Mesh& mesh, const Source& source);

  at::Tensor forward_backward(const std::vector<Batch>& microbatches, const StepContext& context) override;
  StepResult update(const StepOptions& options) override { return optimizer_->step(options); }
  void spend_gradients() override { pipeline_.spend_gradients(); }
  void set_lr(double lr) override { optimizer_->set_lr(lr); }
  at::Tensor evaluate(const std::vector<Batch>& microbatches, std::size_t counted) override;
  Sliced* parameters() override { return &pipeline_; }
  std::vector<Sliced*> state() override { return {&pipeline_, optimizer_.get()}; }

  Pipeline& pipeline() { return pipeline_; }

 private:
  World world_;
  std::shared_ptr<std::int64_t> rollbacks_ = std::make_shared<std::int64_t>(0);
  Pipeline pipeline_;
  std::unique_ptr<Optimizer> optimizer_;
};

}  // namespace bonfire
