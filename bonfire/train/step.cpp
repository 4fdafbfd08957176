#include "bonfire/train/step.h"

#include <cmath>
#include <limits>

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>

#include "bonfire/base/error.h"
#include "bonfire/models/model.h"

namespace bonfire {

StepBatches next_batches(Run& run, Tracer& tracer) {
  const auto phase = tracer.phase("data");
  auto batches = run.loader.next();
  require(batches.has_value() && !batches->microbatches.empty(), "the data ended after {} samples",
          run.loader.samples_taken());
  return std::move(*batches);
}

StepLoss forward_backward(Run& run, const StepBatches& batches, std::int64_t step, Tracer& tracer) {
  const auto device = run.world.device();
  const auto count = batches.microbatches.size();
  const auto& fault = run.config.fault;
  // Number of this rank's first sample in the batch of all ranks.
  std::int64_t first_sample = run.mesh.coordinate(Axis::data) * (run.config.train.batch / run.config.data_ranks());
  auto sum = at::zeros({1}, at::TensorOptions(at::kDouble).device(device));
  for (std::size_t i = 0; i < count; ++i) {
    const auto& batch = batches.microbatches[i];
    at::Tensor loss;
    {
      const auto phase = tracer.phase("forward");
      const auto input = batch.input.to(device, batch.input.scalar_type(), /*non_blocking=*/true);
      const auto target = batch.target.to(device, batch.target.scalar_type(), /*non_blocking=*/true);
      run.model->set_dropout(static_cast<std::uint64_t>(step), first_sample);
      first_sample += batch.input.size(0);
      loss = run.model->loss(input, target);
      if (fault.nan_step == step && fault.nan_rank == run.world.rank())
        loss = loss * std::numeric_limits<double>::quiet_NaN();
    }
    sum += loss.detach();
    const auto phase = tracer.phase("backward");
    // All microbatches are of one size: the mean over the batch is the mean of theirs.
    auto part = loss / static_cast<double>(count);
    if (run.scaler) part = run.scaler->scale(part);
    if (i + 1 < count) {
      run.engine.accumulate(part);
    } else {
      run.engine.backward(part);
    }
  }
  const auto& group = run.mesh.group(Axis::data);
  StepLoss loss;
  sum /= static_cast<double>(count);
  if (device.is_cpu()) loss.mine = sum.item<double>();
  auto mean = sum.clone();
  group.all_reduce(mean).wait();
  loss.mean = mean.item<double>() / group.size();
  if (!device.is_cpu()) loss.mine = sum.item<double>();
  return loss;
}

StepResult update_parameters(Run& run, const StepLoss& loss, Tracer& tracer) {
  const auto phase = tracer.phase("optimizer");
  if (!std::isfinite(loss.mean)) {
    run.engine.spend_gradients();
    return {.skipped = true};
  }
  return run.optimizer->step({.clip = run.config.train.clip,
                              .clip_value = run.config.train.clip_value,
                              .scaler = run.scaler ? &*run.scaler : nullptr,
                              .skip_non_finite = true});
}

void enforce_nan_policy(const Run& run, std::int64_t step, const StepLoss& loss, const StepResult& update) {
  const bool loss_finite = std::isfinite(loss.mean);
  // With fp16 a gradient that overflows is the scaler's business.
  if (loss_finite && (!update.skipped || run.scaler)) return;

  std::string what = "the gradients are not finite, although the losses are";
  if (!loss_finite) {
    // Only now, so that a good step costs nothing: whose loss is it?
    const auto& group = run.world.group();
    std::string ranks;
    for (int rank = 0; rank < group.size(); ++rank) {
      const double bad = group.sum(rank == group.rank() && !std::isfinite(loss.mine) ? 1.0 : 0.0);
      if (bad > 0) ranks += fmt::format("{}{}", ranks.empty() ? "" : ", ", rank);
    }
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
