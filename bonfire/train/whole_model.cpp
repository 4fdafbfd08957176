#include "bonfire/train/whole_model.h"

#include <limits>
#include <optional>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>

#include "bonfire/models/model.h"
#include "bonfire/shard/build_scope.h"
#include "bonfire/train/capturable.h"
#include "bonfire/train/engine_options.h"
#include "bonfire/train/selection.h"

namespace bonfire {
namespace {

// Unit by Unit: a rank never holds more of the model than its shares and the Unit that is being built. A Unit that is being
// built does not know its name, so with names to be ignored the model is built whole.
std::shared_ptr<Model> make_model(const World& world, const Config& config, const Mesh& mesh) {
  std::optional<Build> scope;
  const int part = mesh.coordinate(Axis::tensor);
  if (config.layout.ignore.empty()) scope.emplace(mesh, engine_options(config, world.log(), part));
  auto model = build_model(model_of(config, part), build_options(config, world, mesh));
  prepare_blocks(*model, config);
  return model;
}

std::unique_ptr<DeviceSteps> make_steps(const World& world, const Config& config, const Mesh& mesh) {
  if (world.device().is_cpu()) return nullptr;
  const auto hindrance = hindrance_to_graphs(config);
  if (world.rank() == 0 && config.train.graphs == "auto" && !hindrance.empty())
    world.log().info("steps are not captured: {}", hindrance);
  return hindrance_to_device_steps(config).empty() ? std::make_unique<DeviceSteps>(world, mesh, config) : nullptr;
}

}  // namespace

WholeModel::WholeModel(const World& world, const Config& config, const Mesh& mesh)
    : world_(world),
      fault_(config.fault),
      faulty_(has_faulty_loss(config, world)),
      model(make_model(world, config, mesh)),
      engine(shard(mesh, *model, engine_options(config, world.log(), mesh.coordinate(Axis::tensor)))),
      optimizer(make_optimizer(engine, config)),
      steps_(make_steps(world, config, mesh)) {}

std::shared_ptr<StepReading> WholeModel::whole_step(const std::vector<Batch>& microbatches, const StepContext& context,
                                                    const StepOptions& options) {
  return steps_ ? steps_->step(*this, microbatches, context, options) : nullptr;
}

at::Tensor WholeModel::forward_backward(const std::vector<Batch>& microbatches, const StepContext& context) {
  if (steps_) steps_->settle();
  return passes(microbatches, context);
}

at::Tensor WholeModel::passes(const std::vector<Batch>& microbatches, const StepContext& context) {
  const auto device = world_.device();
  const auto count = microbatches.size();
  auto first_sample = context.first_sample;
  auto sum = at::zeros({1}, at::TensorOptions(at::kDouble).device(device));
  for (std::size_t i = 0; i < count; ++i) {
    const auto& batch = microbatches[i];
    at::Tensor loss;
    {
      const auto phase = context.tracer.phase("forward");
      const auto input = batch.input.to(device, batch.input.scalar_type(), /*non_blocking=*/true);
      const auto target = batch.target.to(device, batch.target.scalar_type(), /*non_blocking=*/true);
      model->set_dropout(static_cast<std::uint64_t>(context.step), first_sample);
      model->set_documents(batch.documents);
      first_sample += batch.input.size(0);
      loss = model->loss(input, target);
      if (faulty_ && fault_.makes_nan(context.step, context.rollbacks))
        loss = loss * std::numeric_limits<double>::quiet_NaN();
    }
    sum += loss.detach();
    const auto phase = context.tracer.phase("backward");
    // All microbatches are of one size: the mean over the batch is the mean of theirs.
    auto part = loss / static_cast<double>(count);
    if (context.scaler) part = context.scaler->scale(part);
    if (i + 1 < count) {
      engine.accumulate(part);
    } else {
      engine.backward(part);
    }
  }
  return sum.div_(static_cast<double>(count));
}

at::Tensor WholeModel::evaluate(const std::vector<Batch>& microbatches, std::size_t counted) {
  const c10::NoGradGuard no_gradients;
  const auto device = world_.device();
  auto sums = at::zeros({2}, at::TensorOptions(at::kDouble).device(device));
  model->eval();
  for (std::size_t at = 0; at < microbatches.size(); ++at) {
    const auto& batch = microbatches[at];
    model->set_documents(batch.documents);
    const auto loss = model->loss(batch.input.to(device), batch.target.to(device));
    if (at >= counted) continue;
    const auto samples = static_cast<double>(batch.input.size(0));
    sums[0] += loss * samples;
    sums[1] += samples;
  }
  model->train();
  return sums;
}

}  // namespace bonfire
