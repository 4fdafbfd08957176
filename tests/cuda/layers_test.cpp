// Adapters, reversible blocks and recomputation through the real loop on a GPU: the curve of a CPU, and the collectives of
// the plan.
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "bonfire/comm/device.h"
#include "bonfire/train/build.h"
#include "bonfire/train/step.h"
#include "tests/support/gpu_ranks.h"
#include "tests/train/step_collectives.h"

namespace bonfire::layers_test {
namespace {

using testing::planned_collectives;
using testing::recorded_collectives;
using testing::run_gpu_ranks;

using Overrides = std::vector<std::string>;

Overrides operator+(Overrides one, const Overrides& other) {
  one.insert(one.end(), other.begin(), other.end());
  return one;
}

const std::map<std::string, std::string> models = {
    {"llama",
     "[model]\ntype = \"llama\"\ndim = 64\nlayers = 3\nheads = 4\nkv_heads = 2\nffn = 96\nvocab = 80\n[data]\nsequence = "
     "16\nbranching = 4\n"},
    {"gpt2",
     "[model]\ntype = \"gpt2\"\ndim = 64\nlayers = 3\nheads = 4\nvocab = 80\ntied = true\n[data]\nsequence = 16\nbranching "
     "= "
     "4\n"},
    {"mlp", "[model]\ntype = \"mlp\"\ndim = 64\nlayers = 3\ninputs = 16\nclasses = 5\n"}};

Config config_of(const std::string& model, int ranks, const Overrides& overrides) {
  Config config = parse_config(
      models.at(model) + "[train]\nsteps = 8\nbatch = 32\n[optimizer]\nlr = 0.01\nwarmup = 1\n[checkpoint]\nevery = 0\n",
      "a.toml", overrides);
  resolve(config, ranks);
  return config;
}

struct Curve {
  std::vector<double> losses, norms;
};

Curve curve_of(const World& world, const Config& config) {
  bonfire::Run run(world, config);
  Tracer tracer(world, config, "");
  Curve curve;
  for (std::int64_t step = 1; step <= config.train.steps; ++step) {
    const auto batches = *run.loader.next();
    auto taken = take_step(run, batches, step, tracer);
    read(run, taken);
    curve.losses.push_back(taken.loss.mean);
    curve.norms.push_back(taken.update.gradient_norm);
  }
  return curve;
}

void expect_near(const Curve& seen, const Curve& expected, double part) {
  ASSERT_EQ(seen.losses.size(), expected.losses.size());
  for (std::size_t step = 0; step < expected.losses.size(); ++step)
    EXPECT_NEAR(seen.losses[step], expected.losses[step], part * expected.losses[step]) << "step " << step + 1;
}

std::vector<Overrides> kinds_of(const std::string& model) {
  const char* some =
      model == "llama" ? "adapter.match=[\"q_proj\", \"down_proj\", \"lm_head\"]" : "adapter.match=[\"c_attn\"]";
  return {{"adapter.rank=4"},
          {"adapter.rank=4", some},
          {"model.reversible=true"},
          {"model.reversible=true", "adapter.rank=4"},
          {"layout.recompute=full", "adapter.rank=4"}};
}

class GpuKindsOfLayers : public ::testing::TestWithParam<int> {};

TEST_P(GpuKindsOfLayers, HaveTheCurveOfACpu) {
  BONFIRE_SKIP_WITHOUT_GPU();
  make_deterministic();
  run_gpu_ranks(GetParam(), [](World& world) {
    const int ranks = world.size();
    for (const char* model : {"llama", "gpt2"})
      for (const auto& kind : kinds_of(model)) {
        SCOPED_TRACE(fmt::format("{} {}", model, fmt::join(kind, " ")));
        const auto alone = curve_of(World(), config_of(model, 1, kind + Overrides{"run.device=cpu"}));
        EXPECT_LT(alone.losses.back(), alone.losses.front());
        const Overrides layout = kind + Overrides{fmt::format("layout.shard={}", ranks)};
        expect_near(curve_of(world, config_of(model, ranks, layout)), alone, 1e-4);
        expect_near(curve_of(world, config_of(model, ranks, layout + Overrides{"train.precision=bf16"})), alone, 0.02);
      }
  });
}

TEST_P(GpuKindsOfLayers, HaveExactlyTheCollectivesOfThePlan) {
  BONFIRE_SKIP_WITHOUT_GPU();
  run_gpu_ranks(GetParam(), [](World& world) {
    for (const char* model : {"llama", "gpt2"})
      for (const auto& kind : kinds_of(model)) {
        const auto config = config_of(model, world.size(),
                                      kind + Overrides{fmt::format("layout.shard={}", world.size()), "train.precision=bf16",
                                                       fmt::format("train.microbatch={}", 16 / world.size())});
        EXPECT_EQ(recorded_collectives(world, config), planned_collectives(config, world.rank()))
            << model << " " << fmt::format("{}", fmt::join(kind, " "));
      }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, GpuKindsOfLayers, ::testing::Values(1, 2),
                         [](const auto& info) { return "ranks" + std::to_string(info.param); });

// A product that is made again rounds by the scales that it had. Attention's gradient in bf16 varies from run to run, so
// that bits are compared where there is none, and elsewhere curves.
TEST(GpuRecomputedEightBits, HaveTheCurveOfOthers) {
  BONFIRE_SKIP_WITHOUT_GPU();
  make_deterministic();
  run_gpu_ranks(1, [](World& world) {
    if (const auto info = gpu_info(world.device().index()); 10 * info.major + info.minor < 89) return;
    for (const char* model : {"mlp", "llama"})
      for (const char* scaling : {"delayed", "current"}) {
        const Overrides both{"train.precision=fp8", std::string("train.fp8_scaling=") + scaling, "train.microbatch=16"};
        const auto plain = curve_of(world, config_of(model, 1, both));
        for (const char* how : {"full", "selective"}) {
          SCOPED_TRACE(fmt::format("{} {} {}", model, scaling, how));
          const auto made = curve_of(world, config_of(model, 1, both + Overrides{std::string("layout.recompute=") + how}));
          expect_near(made, plain, 0.02);
          if (model != std::string("mlp")) continue;
          EXPECT_EQ(made.losses, plain.losses);
          EXPECT_EQ(made.norms, plain.norms);
        }
      }
  });
}

}  // namespace
}  // namespace bonfire::layers_test
