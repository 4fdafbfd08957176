#include "bonfire/train/step.h"

#include <cmath>

#include <ATen/core/Tensor.h>
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
StepLoss forward_backward(Run& run, const StepBatches& batches, const Trainee::Pass& pass) {
  const auto device = run.world.device();
  const auto own = run.trainee->forward_backward(batches.microbatches, pass);
  const auto& group = run.mesh.group(Axis::data);
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
  StepTaken taken{.step = step, .lr = run.learning_rate.at(step - 1)};
  run.trainee->set_lr(taken.lr);
  const Trainee::Pass pass{
      .step = step,
      .first_sample = run.mesh.coordinate(Axis::data) * (run.config.train.batch / run.config.data_ranks()),
      .scaler = run.scaler ? &*run.scaler : nullptr,
      .tracer = tracer};
  // A trace shows the parts.
  if (!tracer.tracing()) taken.reading = run.trainee->whole_step(batches.microbatches, pass, options_of(run));
  if (taken.reading) return taken;
  taken.loss = forward_backward(run, batches, pass);
  taken.update = update_parameters(run, taken.loss, tracer);
  return taken;
}

void read(const Run& run, StepTaken& taken) {
  if (!taken.reading) return;
  const auto values = taken.reading->read();
  taken.loss = {.mine = values.own_loss, .mean = values.sum_of_losses / run.mesh.group(Axis::data).size()};
  const bool loss_finite = std::isfinite(taken.loss.mean);
  if (loss_finite) taken.update.gradient_norm = values.gradient_norm;
  taken.update.skipped = !loss_finite || !std::isfinite(values.gradient_norm);
  taken.reading.reset();
}

void enforce_nan_policy(const Run& run, const StepTaken& taken) {
  const auto& [step, lr, loss, update, reading] = taken;
  const bool loss_finite = std::isfinite(loss.mean);
  // With fp16 a gradient that overflows is the scaler's business.
  if (loss_finite && (!update.skipped || run.scaler)) return;

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
  if (run.config.train.nan_policy == "skip") {
    if (run.world.rank() == 0)
      run.world.log().warning("step {}: {}; skipped on all ranks (train.nan_policy = skip)", step, what);
    return;
  }
  fail("step {}: {}; the run ends on all ranks (train.nan_policy = stop, allowed: stop | skip)", step, what);
}

}  // namespace bonfire
