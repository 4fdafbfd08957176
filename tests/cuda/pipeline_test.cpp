// Law 1 for pipelines over NCCL: stages share the GPUs there are.
#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <fmt/format.h>

#include "bonfire/comm/device.h"
#include "bonfire/schedule/generate.h"
#include "tests/support/gpu_ranks.h"
#include "tests/support/pipeline_training.h"
#include "tests/support/tiny_training.h"

namespace bonfire::pipeline_test {
namespace {

using testing::PipelineRun;
using testing::run_gpu_ranks;
using testing::tiny_models;

PipelineRun tied_run(int ranks) {
  PipelineRun run{.spec = tiny_models()[2].spec, .shape = {.pipeline = ranks}, .microbatches = 8};
  run.spec.layers = 6;
  return run;
}

class GpuPipeline : public ::testing::TestWithParam<int> {};

TEST_P(GpuPipeline, ParityOfSchedules) {
  BONFIRE_SKIP_WITHOUT_GPU();
  make_deterministic();
  run_gpu_ranks(GetParam(), [](World& world) {
    auto run = tied_run(world.size());
    const auto plain = testing::train_plainly(run);
    for (const auto* name : {"1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v"}) {
      run.schedule = name;
      run.chunks = schedule::natural_chunks(name);
      SCOPED_TRACE(name);
      const auto outcome = testing::train_pipeline(world, run);
      testing::expect_parity(outcome, plain);
      EXPECT_EQ(outcome.executed, outcome.row);
    }
  });
}

TEST_P(GpuPipeline, ParityWithShards) {
  BONFIRE_SKIP_WITHOUT_GPU();
  if (GetParam() < 4) GTEST_SKIP() << "needs four ranks";
  make_deterministic();
  run_gpu_ranks(GetParam(), [](World& world) {
    auto run = tied_run(2);
    run.shape = {.pipeline = 2, .shard = 2};
    const auto plain = testing::train_plainly(run);
    for (const auto what : {Sharded::optimizer, Sharded::gradients, Sharded::parameters})
      for (const auto* name : {"1f1b", "zb-v"}) {
        run.shard.what = what;
        run.schedule = name;
        run.chunks = schedule::natural_chunks(name);
        SCOPED_TRACE(fmt::format("{}, {} sharded", name, plan::name_of(what)));
        testing::expect_parity(testing::train_pipeline(world, run), plain);
      }
  });
}

// On one stage of two ranks, and with four ranks on two.
TEST_P(GpuPipeline, ParityOfUnitsThatGatherThemselves) {
  BONFIRE_SKIP_WITHOUT_GPU();
  make_deterministic();
  run_gpu_ranks(GetParam(), [](World& world) {
    auto run = tied_run(world.size() / 2);
    run.shape = {.pipeline = world.size() / 2, .shard = 2};
    run.steps = 3;
    run.shard.what = Sharded::parameters;
    run.shard.reshard_after_forward = true;
    const auto plain = testing::train_plainly(run);
    for (const auto* name : {"1f1b", "interleaved"})
      for (const int prefetch : {0, 2}) {
        run.schedule = name;
        run.chunks = schedule::natural_chunks(name);
        run.shard.prefetch = prefetch;
        SCOPED_TRACE(fmt::format("{}, {} ahead", name, prefetch));
        const auto outcome = testing::train_pipeline(world, run);
        testing::expect_parity(outcome, plain);
        for (const auto& action : outcome.row) EXPECT_FALSE(schedule::is_sharding(action.kind));
      }
  });
}

TEST_P(GpuPipeline, Bf16FollowsFp32) {
  BONFIRE_SKIP_WITHOUT_GPU();
  run_gpu_ranks(GetParam(), [](World& world) {
    auto run = tied_run(world.size());
    run.dtype = at::kFloat;
    run.steps = 4;
    const auto plain = testing::train_plainly(run);
    run.compute = at::kBFloat16;
    for (const auto* name : {"1f1b", "interleaved", "zb-h1"}) {
      run.schedule = name;
      run.chunks = schedule::natural_chunks(name);
      const auto outcome = testing::train_pipeline(world, run);
      for (std::size_t step = 0; step < plain.losses.size(); ++step)
        EXPECT_NEAR(outcome.losses[step], plain.losses[step], 0.02 * plain.losses[step]) << name;
    }
  });
}

TEST_P(GpuPipeline, TwoRunsGiveEqualBits) {
  BONFIRE_SKIP_WITHOUT_GPU();
  make_deterministic();
  run_gpu_ranks(GetParam(), [](World& world) {
    auto run = tied_run(world.size());
    run.dtype = at::kFloat;
    run.schedule = "zb-h1";
    const auto first = testing::train_pipeline(world, run), second = testing::train_pipeline(world, run);
    EXPECT_EQ(first.losses, second.losses);
    for (const auto& [name, weight] : first.weights) EXPECT_TRUE(at::equal(weight, second.weights.at(name))) << name;
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, GpuPipeline, ::testing::Values(2, 4),
                         [](const auto& info) { return "ranks" + std::to_string(info.param); });

}  // namespace
}  // namespace bonfire::pipeline_test
