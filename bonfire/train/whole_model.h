#pragma once

#include <memory>

#include "bonfire/comm/world.h"
#include "bonfire/shard/engine.h"
#include "bonfire/train/config.h"
#include "bonfire/train/device_steps.h"
#include "bonfire/train/trainee.h"

namespace bonfire {

class Model;

// Every rank has the whole model, or its shares of all of it.
class BONFIRE_API WholeModel final : public Trainee {
 public:
  // Collective.
  WholeModel(const World& world, const Config& config, const Mesh& mesh);

  at::Tensor forward_backward(const std::vector<Batch>& microbatches, const StepContext& context) override;
  std::shared_ptr<StepReading> whole_step(const std::vector<Batch>& microbatches, const StepContext& context,
                                          const StepOptions& options) override;
  StepResult update(const StepOptions& options) override { return optimizer->step(options); }
  void spend_gradients() override { engine.spend_gradients(); }
  void set_lr(double lr) override { optimizer->set_lr(lr); }
  at::Tensor evaluate(const std::vector<Batch>& microbatches, std::size_t counted) override;
  Sliced* parameters() override { return &engine; }
  std::vector<Sliced*> state() override { return {&engine, optimizer.get()}; }

  // forward_backward, whatever steps before are still under way. Collective.
  at::Tensor passes(const std::vector<Batch>& microbatches, const StepContext& context);

 private:
  World world_;
  Config::Fault fault_;
  bool faulty_;

 public:
  std::shared_ptr<Model> model;
  Engine engine;
  std::unique_ptr<Optimizer> optimizer;

 private:
  std::unique_ptr<DeviceSteps> steps_;  // null: every step is taken in parts
};

}  // namespace bonfire
