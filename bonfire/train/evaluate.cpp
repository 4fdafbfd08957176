#include "bonfire/train/evaluate.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>

#include "bonfire/comm/progress.h"
#include "bonfire/models/model.h"

namespace bonfire {

double evaluate(Run& run) {
  const ProgressBoard::Busy busy(run.world.progress().get(), "evaluation");
  const c10::NoGradGuard no_gradients;
  const auto device = run.world.device();
  Loader loader(run.data.held_out, {.batch = run.config.train.batch,
                                    .microbatch = run.config.train.microbatch,
                                    .rank = run.mesh.coordinate(Axis::data),
                                    .ranks = static_cast<int>(run.config.data_ranks()),
                                    .shuffle = false,
                                    .epochs = 1,
                                    .drop_last = false,
                                    .prefetch = 0});
  run.model->eval();
  // Sum of the losses and number of samples: held-out data may end in the middle of a batch, unevenly over the ranks.
  auto sums = at::zeros({2}, at::TensorOptions(at::kDouble).device(device));
  for (std::int64_t i = 0; i < run.config.train.eval_batches; ++i) {
    const auto batches = loader.next();
    if (!batches) break;
    for (const auto& batch : batches->microbatches) {
      const auto samples = static_cast<double>(batch.input.size(0));
      sums[0] += run.model->loss(batch.input.to(device), batch.target.to(device)) * samples;
      sums[1] += samples;
    }
  }
  run.model->train();
  run.mesh.group(Axis::data).all_reduce(sums).wait();
  return sums[0].item<double>() / sums[1].item<double>();
}

}  // namespace bonfire
