// The laws of data parallelism over NCCL: ranks share the GPUs there are.
#include <cstdlib>

#include <gtest/gtest.h>

#include <string>

#include <ATen/ATen.h>
#include <fmt/format.h>

#include "bonfire/comm/device.h"

#include "tests/support/gpu_ranks.h"
#include "tests/support/tiny_training.h"

namespace bonfire::laws_test {
namespace {

using testing::relative_distance;
using testing::run_gpu_ranks;
using testing::tiny_models;
using testing::train_tiny;

class GpuLaws : public ::testing::TestWithParam<int> {};

// What is known of weights that should be alike and are not: where they part, and whether each side makes the same bits
// again.
std::string account_of(const World& world, const testing::TinyRun& run, const testing::TinyOutcome& on_gpu,
                       const testing::TinyOutcome& alone) {
  const auto off = (on_gpu.weights - alone.weights).abs();
  const auto place = off.argmax().item<std::int64_t>();
  std::string words = fmt::format("weight {} of {} is {:.17g} and {:.17g}, {} are further apart than 1e-14; losses", place,
                                  off.numel(), on_gpu.weights[place].item<double>(), alone.weights[place].item<double>(),
                                  (off > 1e-14).sum().item<std::int64_t>());
  for (std::size_t step = 0; step < alone.losses.size(); ++step)
    words += fmt::format(" {:.3g}", on_gpu.losses[step] - alone.losses[step]);
  words += fmt::format(" apart; the CPU again: {}", at::equal(train_tiny(World(), {.spec = run.spec}).weights, alone.weights)
                                                        ? "the same bits"
                                                        : "other bits");
  if (world.size() == 1)  // other ranks may have found nothing to account for
    words += fmt::format("; the GPU again: {}",
                         at::equal(train_tiny(world, run).weights, on_gpu.weights) ? "the same bits" : "other bits");
  return words;
}

// The weights of any number of GPU ranks are those of one CPU rank.
TEST_P(GpuLaws, ParityOfEveryModel) {
  BONFIRE_SKIP_WITHOUT_GPU();
  run_gpu_ranks(GetParam(), [](World& world) {
    // Weights are as far apart as convolutions are inexact. With cuDNN (BONFIRE_TEST_CUDNN=1) they once were 1.5e-9 apart.
    at::globalContext().setUserEnabledCuDNN(std::getenv("BONFIRE_TEST_CUDNN") != nullptr);
    for (const auto& [name, spec] : tiny_models())
      for (const int accumulation : {1, 4}) {
        SCOPED_TRACE(name);
        const testing::TinyRun given{.spec = spec, .accumulation = accumulation};
        const auto run = train_tiny(world, given);
        const auto alone = train_tiny(World(), {.spec = spec});
        for (std::size_t step = 0; step < alone.losses.size(); ++step)
          EXPECT_NEAR(run.losses[step], alone.losses[step], 1e-12 * alone.losses[step]);
        if (const double distance = relative_distance(run.weights, alone.weights); !(distance < 1e-12))
          ADD_FAILURE() << distance << " apart: " << account_of(world, given, run, alone);
      }
  });
}

TEST_P(GpuLaws, TwoRunsGiveEqualBits) {
  BONFIRE_SKIP_WITHOUT_GPU();
  make_deterministic();
  run_gpu_ranks(GetParam(), [](World& world) {
    for (const auto& [name, spec] : tiny_models()) {
      SCOPED_TRACE(name);
      const testing::TinyRun run{.spec = spec, .dtype = at::kFloat};
      const auto first = train_tiny(world, run), second = train_tiny(world, run);
      EXPECT_EQ(first.losses, second.losses);
      EXPECT_TRUE(at::equal(first.weights, second.weights));
    }
  });
}

// Two bytes a number: the curve follows fp32's.
TEST_P(GpuLaws, MixedPrecisionFollowsFp32) {
  BONFIRE_SKIP_WITHOUT_GPU();
  run_gpu_ranks(GetParam(), [](World& world) {
    for (const auto& [name, spec] : tiny_models()) {
      SCOPED_TRACE(name);
      const auto exact = train_tiny(world, {.spec = spec, .dtype = at::kFloat});
      for (const auto compute : {at::kBFloat16, at::kHalf}) {
        const auto rounded =
            train_tiny(world, {.spec = spec, .dtype = at::kFloat, .compute = compute, .scaled = compute == at::kHalf});
        for (std::size_t step = 0; step < exact.losses.size(); ++step)
          EXPECT_NEAR(rounded.losses[step], exact.losses[step], 0.02 * exact.losses[step]);
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, GpuLaws, ::testing::Values(1, 2, 4),
                         [](const auto& info) { return "ranks" + std::to_string(info.param); });

}  // namespace
}  // namespace bonfire::laws_test
