#include "bonfire/train/step.h"

#include <cmath>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "bonfire/base/error.h"

namespace bonfire {

StepBatches next_batches(Run& run, Tracer& tracer) {
  const auto phase = tracer.phase("data");
  auto batches = run.loader.next();
  require(batches.has_value() && !batches->microbatches.empty(), "the data ended after {} samples",
          run.loader.samples_taken());
  return std::move(*batches);
}

namespace {

StepOptions options_of(Run& run) {
  return {.clip = run.config.train.clip,
          .clip_value = run.config.train.clip_value,
          .scaler = run.scaler ? &*run.scaler : nullptr,
          .skip_non_finite = true};
}

// Gradients are the average over the whole batch afterwards.
StepLoss forward_backward(Run& run, const StepBatches& batches, const Trainee::StepContext& context) {
  const auto device = run.world.device();
  const auto own = run.trainee->forward_backward(batches.microbatches, context);
  const auto& group = run.groups.all;
  StepLoss loss;
  if (device.is_cpu()) loss.mine = own.item<double>();
  auto mean = own.clone();
  group.all_reduce(mean).wait();
  loss.mean = mean.item<double>() / group.size();
  if (!device.is_cpu()) loss.mine = own.item<double>();
  return loss;
}

StepResult update_parameters(Run& run, const StepLoss& loss, Tracer& tracer) {
  const auto phase = tracer.phase("optimizer");
  if (!std::isfinite(loss.mean)) {
    run.trainee->spend_gradients();
    return {.skipped = true};
  }
  return run.trainee->update(options_of(run));
}

}  // namespace

StepTaken take_step(Run& run, const StepBatches& batches, std::int64_t step, Tracer& tracer) {
  if (const auto& fault = run.config.fault; fault.memory_step == step && fault.memory_rank == run.world.rank())
    at::empty({std::int64_t{1} << 60}, at::TensorOptions(at::kByte).device(run.world.device()));
  StepTaken taken{.step = step, .lr = run.learning_rate.at(step - 1)};
  run.trainee->set_lr(taken.lr);
  const Trainee::StepContext context{
      .step = step,
      .first_sample = run.mesh.coordinate(Axis::data) * (run.config.train.batch / run.config.data_ranks()),
      .scaler = run.scaler ? &*run.scaler : nullptr,
      .rollbacks = run.rollbacks,
      .tracer = tracer};
  // A trace shows the parts, where there are any.
  if (!tracer.tracing() || run.trainee->overlaps())
    taken.reading = run.trainee->whole_step(batches.microbatches, context, options_of(run));
  if (taken.reading) return taken;
  taken.loss = forward_backward(run, batches, context);
  taken.update = update_parameters(run, taken.loss, tracer);
  return taken;
}

void read(const Run& run, StepTaken& taken) {
  if (!taken.reading) return;
  const auto values = taken.reading->read();
  taken.loss = {.mine = values.own_loss, .mean = values.sum_of_losses / run.groups.all.size()};
  const bool loss_finite = std::isfinite(taken.loss.mean);
  if (loss_finite) taken.update.gradient_norm = values.gradient_norm;
  taken.staleness = values.staleness;
  taken.stale_stages = values.stale_stages;
  taken.seconds = values.seconds;
  taken.update.skipped = !loss_finite || !std::isfinite(values.gradient_norm);
  taken.reading.reset();
}

bool enforce_nan_policy(const Run& run, const StepTaken& taken) {
  const auto& [step, lr, loss, update, staleness, seconds, stale_stages, reading] = taken;
  const bool loss_finite = std::isfinite(loss.mean);
  // With fp16 a gradient that overflows is the scaler's business.
  if (loss_finite && (!update.skipped || run.scaler)) return true;

  std::string what = "the gradients are not finite, although the losses are";
  if (!loss_finite) {
    // Only now, so that a good step costs nothing: whose loss is it?
    const auto& group = run.world.group();
    auto bad = at::zeros({group.size()}, at::kDouble);
    if (!std::isfinite(loss.mine)) bad[group.rank()] = 1;
    bad = bad.to(run.world.device());
    group.all_reduce(bad).wait();
    bad = bad.cpu();
    constexpr int kMostNamed = 16;
    std::string ranks;
    int named = 0;
    for (int rank = 0; rank < group.size(); ++rank)
      if (bad[rank].item<double>() > 0 && named++ < kMostNamed)
        ranks += fmt::format("{}{}", ranks.empty() ? "" : ", ", rank);
    if (named > kMostNamed) ranks += fmt::format(" and {} others", named - kMostNamed);
    what = fmt::format("the loss is {}, from rank {}", loss.mean, ranks.empty() ? "none alone" : ranks);
  }
  const auto& policy = run.config.train.nan_policy;
  if (policy == "stop")
    fail("step {}: {}; the run ends on all ranks (train.nan_policy = stop, allowed: stop | skip | rollback)", step, what);
  const bool skips = policy == "skip";
  if (run.world.rank() == 0)
    run.world.log().warning("step {}: {}; {} (train.nan_policy = {})", step, what,
                            skips ? "skipped on all ranks" : "all ranks go back to the newest checkpoint", policy);
  return skips;
}

}  // namespace bonfire
