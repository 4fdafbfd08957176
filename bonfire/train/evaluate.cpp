#include "bonfire/train/evaluate.h"

#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>

#include "bonfire/comm/progress.h"

namespace bonfire {
namespace {

at::Tensor one_sample(const SampleField& field) {
  std::vector<std::int64_t> sizes{1};
  sizes.insert(sizes.end(), field.sizes.begin(), field.sizes.end());
  return at::empty(sizes, field.dtype);
}

Batch first_sample(const Source& source) {
  Batch batch{one_sample(source.input()), one_sample(source.target()), {0}};
  source.read(0, batch.input.data_ptr(), batch.target.data_ptr());
  if (source.separates_documents()) {
    batch.documents = at::empty_like(batch.input);
    source.document_starts(0, {batch.documents.data_ptr<std::int64_t>(), static_cast<std::size_t>(batch.documents.numel())});
  }
  return batch;
}

}  // namespace

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
  // Sum of the losses and number of samples: held-out data may end in the middle of a batch, unevenly over the ranks.
  auto sums = at::zeros({2}, at::TensorOptions(at::kDouble).device(device));
  for (std::int64_t i = 0; i < run.config.train.eval_batches; ++i) {
    auto batches = loader.next();
    if (!batches) break;
    // Where parameters are sharded a forward needs all ranks: one that has run out of data runs a sample that does not
    // count.
    const std::int64_t ranks = run.config.data_ranks(), microbatch = run.config.train.microbatch;
    const std::int64_t longest = (batches->samples + ranks - 1) / ranks;
    auto& own = batches->microbatches;
    const auto counted = own.size();
    const auto rounds = static_cast<std::size_t>((longest + microbatch - 1) / microbatch);
    if (counted < rounds) own.resize(rounds, first_sample(*run.data.held_out));
    sums += run.trainee->evaluate(own, counted);
  }
  run.groups.all.all_reduce(sums).wait();
  return sums[0].item<double>() / sums[1].item<double>();
}

}  // namespace bonfire
