#pragma once

#include <memory>
#include <vector>

#include "bonfire/comm/world.h"
#include "bonfire/data/source.h"
#include "bonfire/pipeline/pipeline.h"
#include "bonfire/train/config.h"
#include "bonfire/train/trainee.h"

namespace bonfire {

// The model of a configuration as a chain of Units.
BONFIRE_API Chain chain_of(const Config& config, const World& world);
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

  at::Tensor forward_backward(const std::vector<Batch>& microbatches, const Pass& pass) override;
  StepResult update(const StepOptions& options) override;
  void spend_gradients() override;
  void set_lr(double lr) override;
  at::Tensor evaluate(const std::vector<Batch>& microbatches, std::size_t counted) override;

  Pipeline& pipeline() { return pipeline_; }

 private:
  World world_;
  Pipeline pipeline_;
  std::vector<std::unique_ptr<Optimizer>> optimizers_;  // of the local stages
  std::vector<Optimizer*> together_;
  ModelParts parts_;
};

}  // namespace bonfire
