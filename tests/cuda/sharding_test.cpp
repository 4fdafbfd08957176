// The laws of sharding over NCCL: ranks share the GPUs there are.
#include <gtest/gtest.h>

#include <algorithm>

#include <ATen/ATen.h>
#include <fmt/ranges.h>

#include "bonfire/comm/device.h"
#include "bonfire/comm/recorder.h"
#include "bonfire/models/model.h"
#include "bonfire/optim/optimizer.h"
#include "bonfire/train/memory.h"
#include "tests/support/gpu_ranks.h"
#include "tests/support/tiny_training.h"

namespace bonfire::sharding_test {
namespace {

using testing::relative_distance;
using testing::run_gpu_ranks;
using testing::tiny_data;
using testing::tiny_models;
using testing::train_tiny;

class GpuSharding : public ::testing::TestWithParam<int> {};

TEST_P(GpuSharding, ParityOfEveryModel) {
  BONFIRE_SKIP_WITHOUT_GPU();
  run_gpu_ranks(GetParam(), [](World& world) {
    at::globalContext().setUserEnabledCuDNN(false);  // as in GpuLaws
    for (const auto& [name, spec] : tiny_models()) {
      SCOPED_TRACE(name);
      const auto alone = train_tiny(World(), {.spec = spec, .frozen = true});
      for (int factor = world.size() == 4 ? 2 : 1; factor <= world.size(); factor *= 2)
        for (const auto what : {Sharded::optimizer, Sharded::gradients, Sharded::parameters})
          for (const bool free : {true, false}) {
            // Ranks that share a GPU are slow: with four of them all of what two cannot show, hybrid and tied, and of the
            // rest what comes and goes.
            if (world.size() == 4 && !spec.tied && (what != Sharded::parameters || !free)) continue;
            const auto run = train_tiny(world, {.spec = spec,
                                                .accumulation = free ? 3 : 1,
                                                .frozen = true,
                                                .factor = factor,
                                                .options = {.what = what, .reshard_after_forward = free, .prefetch = 1}});
            SCOPED_TRACE(fmt::format("F = {}, {}, {}", factor, plan::name_of(what), free ? "free" : "keep"));
            for (std::size_t step = 0; step < alone.losses.size(); ++step)
              EXPECT_NEAR(run.losses[step], alone.losses[step], 1e-12 * alone.losses[step]);
            EXPECT_LT(relative_distance(run.weights, alone.weights), 1e-12);
          }
    }
  });
}

TEST_P(GpuSharding, TwoRunsGiveEqualBits) {
  BONFIRE_SKIP_WITHOUT_GPU();
  make_deterministic();
  run_gpu_ranks(GetParam(), [](World& world) {
    for (const auto& [name, spec] : tiny_models()) {
      if (world.size() == 4 && !spec.tied) continue;
      SCOPED_TRACE(name);
      const testing::TinyRun run{
          .spec = spec, .dtype = at::kFloat, .factor = world.size(), .options = {.what = Sharded::parameters}};
      const auto first = train_tiny(world, run), second = train_tiny(world, run);
      EXPECT_EQ(first.losses, second.losses);
      EXPECT_TRUE(at::equal(first.weights, second.weights));
    }
  });
}

TEST_P(GpuSharding, MixedPrecisionFollowsFp32) {
  BONFIRE_SKIP_WITHOUT_GPU();
  run_gpu_ranks(GetParam(), [](World& world) {
    for (const auto& [name, spec] : tiny_models()) {
      if (world.size() == 4 && !spec.tied) continue;
      SCOPED_TRACE(name);
      const auto exact = train_tiny(world, {.spec = spec, .dtype = at::kFloat});
      for (const auto compute : {at::kBFloat16, at::kHalf}) {
        const auto rounded = train_tiny(world, {.spec = spec,
                                                .dtype = at::kFloat,
                                                .compute = compute,
                                                .scaled = compute == at::kHalf,
                                                .factor = world.size(),
                                                .options = {.what = Sharded::parameters}});
        for (std::size_t step = 0; step < exact.losses.size(); ++step)
          EXPECT_NEAR(rounded.losses[step], exact.losses[step], 0.02 * exact.losses[step]);
      }
    }
  });
}

// Gathers of later Units run while earlier ones compute, and buffers are made once: nothing is allocated for them after the
// second step.
TEST_P(GpuSharding, ThePoolIsTheSameFromTheSecondStepOn) {
  BONFIRE_SKIP_WITHOUT_GPU();
  run_gpu_ranks(GetParam(), [](World& world) {
    plan::ModelSpec spec = tiny_models()[3].spec;
    spec.layers = 6;
    auto model = build_model(spec, {.seed = 5, .dtype = at::kFloat, .device = world.device()});
    Engine engine = shard(world.mesh({.shard = world.size()}), *model, {.what = Sharded::parameters, .prefetch = 2});
    AdamW optimizer(engine, {.lr = 0.01});
    std::vector<std::int64_t> bytes;
    for (int step = 0; step < 5; ++step) {
      auto [input, target] = tiny_data(spec, step, 0, 4);
      engine.backward(model->loss(input.to(world.device()), target.to(world.device())));
      optimizer.step({.clip = 1});
      bytes.push_back(engine.pool_bytes());
    }
    for (std::size_t step = 2; step < bytes.size(); ++step) EXPECT_EQ(bytes[step], bytes[1]);
  });
}

// Law: a step's peak is the same from the second on, as torch's caching allocator counts it.
TEST_P(GpuSharding, APeakIsTheSameFromTheSecondStepOn) {
  BONFIRE_SKIP_WITHOUT_GPU();
  run_gpu_ranks(GetParam(), [](World& world) {
    plan::ModelSpec spec = tiny_models()[3].spec;
    spec.layers = 6;
    auto [input, target] = tiny_data(spec, 0, 0, 4);
    const auto x = input.to(world.device()), y = target.to(world.device());
    for (const auto what : {Sharded::optimizer, Sharded::gradients, Sharded::parameters})
      for (const int prefetch : {0, 2})
        for (const auto compute : {at::kFloat, at::kBFloat16}) {
          auto model = build_model(spec, {.seed = 5, .dtype = at::kFloat, .device = world.device()});
          Engine engine = shard(world.mesh({.shard = world.size()}), *model,
                                {.what = what, .precision = {.parameters = compute}, .prefetch = prefetch});
          AdamW optimizer(engine, {.lr = 0.01});
          const MemoryMeter before(world.device());
          std::vector<std::int64_t> peaks;
          for (int step = 0; step < 6; ++step) {
            const MemoryMeter begins_anew(world.device());
            engine.accumulate(model->loss(x, y));
            engine.backward(model->loss(x, y));
            optimizer.step({.clip = 1});
            peaks.push_back(before.peak());
          }
          EXPECT_EQ(std::count(peaks.begin() + 1, peaks.end(), peaks.back()), 5) << fmt::format(
              "{}, prefetch {}, {}: {}", plan::name_of(what), prefetch, c10::toString(compute), fmt::join(peaks, " "));
        }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, GpuSharding, ::testing::Values(1, 2, 4),
                         [](const auto& info) { return "ranks" + std::to_string(info.param); });

}  // namespace
}  // namespace bonfire::sharding_test
