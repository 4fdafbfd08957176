// PipeDream's equations over NCCL: stages share the GPUs there are.
#include "bonfire/pipeline/pipedream.h"

#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/nn/module.h>

#include "bonfire/checkpoint/checkpoints.h"
#include "bonfire/comm/device.h"
#include "bonfire/comm/hear.h"
#include "bonfire/optim/optimizer.h"
#include "tests/pipeline/pipedream_oracle.h"
#include "tests/pipeline/pipedream_trained.h"
#include "tests/support/gpu_ranks.h"
#include "tests/support/shell.h"

namespace bonfire::pipedream_test {
namespace {

// `replicas` of stages with one Unit each.
void expect_equations(World& world, const std::vector<int>& replicas, schedule::WeightMode mode) {
  SCOPED_TRACE(fmt::format("{} on {}", schedule::name_of(mode), fmt::join(replicas, "-")));
  const testing::OracleRun run{.units = std::vector<int>(replicas.size(), 1),
                               .replicas = replicas,
                               .mode = std::string(schedule::name_of(mode)),
                               .microbatches = schedule::endless_shape({.replicas = replicas, .mode = mode}).microbatches};
  const int count = 24;
  testing::Oracle oracle(run);
  oracle.train(count);
  const auto device = world.device();
  PipeDream pipeline(world.mesh({.pipeline = world.size()}), testing::tower(static_cast<int>(replicas.size()), device),
                     {.robin = {.replicas = replicas, .mode = mode, .microbatches = run.microbatches},
                      .example = testing::tower_minibatch(0, 1, device)[0]});
  Sgd optimizer(pipeline, {.lr = run.lr, .momentum = run.momentum});
  pipeline.on_update([&](const StageUpdate&) { optimizer.step(); });
  for (int at = 0; at < count; ++at) pipeline.admit(testing::tower_minibatch(at, run.microbatches, device));
  pipeline.drain();
  const auto expected = oracle.weights();
  const auto whole = pipeline.engine().full_parameters();
  for (const auto& item : pipeline.module().named_parameters()) {
    const auto& other = expected.at(item.key());
    EXPECT_LT((item.value().cpu() - other).norm().item<double>(), 1e-12 * other.norm().item<double>()) << item.key();
  }
}

TEST(GpuPipeDream, TwoStagesFollowTheirEquations) {
  BONFIRE_SKIP_WITHOUT_GPU();
  make_deterministic();
  testing::run_gpu_ranks(2, [](World& world) {
    for (const auto mode : {schedule::WeightMode::stashing, schedule::WeightMode::vertical,
                            schedule::WeightMode::two_buffers, schedule::WeightMode::flush})
      expect_equations(world, {1, 1}, mode);
  });
}

TEST(GpuPipeDream, ReplicatedStagesFollowTheirEquations) {
  BONFIRE_SKIP_WITHOUT_GPU();
  make_deterministic();
  testing::run_gpu_ranks(3, [](World& world) {
    expect_equations(world, {2, 1}, schedule::WeightMode::stashing);
    expect_equations(world, {2, 1}, schedule::WeightMode::flush);
  });
}

// Each rank copies its part from the device in the middle of its row.
TEST(GpuPipeDream, IsSavedWithoutADrain) {
  BONFIRE_SKIP_WITHOUT_GPU();
  make_deterministic();
  const testing::Folder folder;
  const auto run = testing::run_of({1, 1}, schedule::WeightMode::stashing);
  constexpr int step = 4, more = 6;
  testing::Oracle unbroken(run), resumed(run);
  unbroken.train(step + more);
  resumed.train(step);
  resumed.drain();
  resumed.train(more);
  testing::run_gpu_ranks(2, [&](World& world) {
    testing::Trained trained(world, run, world.device());
    const CheckpointContents contents{.tensors = {trained.pipeline.get(), trained.optimizer.get()}};
    // Every process has a folder; that of rank 0 is everybody's.
    Checkpoints checkpoints(world, hear(world.group(), folder.path().string(), 0, world.device()));
    trained.after_update = [&](const StageUpdate& update) {
      if (update.minibatch + 1 == step) checkpoints.contribute(step, contents.tensors);
    };
    trained.train(run, step - 1);
    checkpoints.announce(step, {});
    trained.train(run, 1 + more);
    trained.pipeline->drain();
    testing::expect_weights(*trained.pipeline, unbroken);
    EXPECT_EQ(checkpoints.load_latest(contents), step);
    trained.minibatches = step;
    trained.after_update = nullptr;
    trained.train(run, more);
    trained.pipeline->drain();
    testing::expect_weights(*trained.pipeline, resumed);
  });
}

}  // namespace
}  // namespace bonfire::pipedream_test
