// train.precision = "fp8": weights of the blocks' products are kept and travel in eight bits, as the plan says, and a model
// learns what it learns in bf16.
#include <numeric>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "bonfire/models/model.h"
#include "bonfire/plan/layout.h"
#include "bonfire/train/build.h"
#include "bonfire/train/predict.h"
#include "bonfire/train/selection.h"
#include "bonfire/train/whole_model.h"
#include "tests/train/loop_fixture.h"
#include "tests/train/step_collectives.h"

namespace bonfire::fp8_test {
namespace {

using testing::common;
using testing::Loop;
using testing::models;
using testing::planned_collectives;
using testing::traced_collectives;
using Overrides = std::vector<std::string>;

Overrides fp8(const char* scales, const Overrides& more) {
  Overrides all{"train.precision=fp8", fmt::format("train.fp8_scales={}", scales), "train.clip=0"};
  all.insert(all.end(), more.begin(), more.end());
  return all;
}

const std::vector<Overrides>& layouts() {
  static const std::vector<Overrides> all{{"layout.shard=4", "layout.sharded=optimizer"},
                                          {"layout.shard=4", "layout.sharded=gradients", "train.microbatch=4"},
                                          {"layout.shard=4"},
                                          {"layout.shard=4", "layout.reshard_after_forward=false"},
                                          {"layout.shard=4", "layout.reshard_after_forward=2", "train.microbatch=4"},
                                          {"layout.shard=2", "layout.replicate=2", "layout.prefetch=0"},
                                          {"layout.shard=4", "layout.wrap=all"}};
  return all;
}

// On two ranks, whose sums have no order, and with microbatches added up before ranks are.
TEST_F(Loop, Fp8HasTheSameBitsHoweverWeightsAreDivided) {
  for (const char* scales : {"tensor", "row"})
    for (const char* model : {"gpt2", "llama"}) {
      const auto losses = [&](const Overrides& layout) {
        const auto outcome = run(model, 2, fp8(scales, layout));
        EXPECT_EQ(outcome.error, "") << fmt::format("{}, {}, {}", model, scales, fmt::join(layout, " "));
        return outcome.losses();
      };
      const auto expected = losses({}), in_parts = losses({"train.microbatch=8"});
      ASSERT_EQ(expected.size(), 4u);
      EXPECT_EQ(losses({"layout.shard=2", "layout.sharded=optimizer"}), expected);
      EXPECT_EQ(losses({"layout.shard=2", "layout.sharded=optimizer", "train.microbatch=8"}), in_parts);
      for (const char* what : {"gradients", "parameters"})
        for (const char* free : {"true", "false"}) {
          Overrides layout{"layout.shard=2", fmt::format("layout.sharded={}", what)};
          if (std::string(what) == "parameters") layout.push_back(fmt::format("layout.reshard_after_forward={}", free));
          EXPECT_EQ(losses(layout), expected) << what << ", " << free;
          layout.insert(layout.end(), {"train.microbatch=8", "layout.accumulation=full"});
          EXPECT_EQ(losses(layout), in_parts) << what << ", " << free;
        }
    }
}

TEST_F(Loop, Fp8HasExactlyTheCollectivesOfThePlan) {
  for (const char* scales : {"tensor", "row"})
    for (auto layout : layouts()) {
      layout.insert(layout.end(), {"train.trace_from=3", "train.trace_steps=1"});
      const auto outcome = run("gpt2", 4, fp8(scales, layout));
      ASSERT_EQ(outcome.error, "");
      Config config = parse_config(models.at("gpt2") + common, "a.toml", fp8(scales, layout));
      resolve(config, 4);
      const auto expected = planned_collectives(wrapped_model_of(config), data_parallel_of(config));
      EXPECT_EQ(traced_collectives(outcome.folder), expected) << fmt::format("{}, {}", scales, fmt::join(layout, " "));
      // The blocks' weights, a byte instead of two, in everything that is gathered.
      Overrides in_bf16 = layout;
      in_bf16.push_back("train.precision=bf16");
      Config plain = parse_config(models.at("gpt2") + common, "a.toml", in_bf16);
      resolve(plain, 4);
      const auto gathered = [](const Config& of) {
        std::int64_t sum = 0;
        for (const auto& one : plan::collectives_of_step(wrapped_model_of(of), data_parallel_of(of)))
          if (one.kind == CollectiveKind::all_gather) sum += one.bytes;
        return sum;
      };
      EXPECT_LT(static_cast<double>(gathered(config)), 0.75 * static_cast<double>(gathered(plain)));
    }
}

TEST_F(Loop, Fp8HoldsWhatIsPredicted) {
  for (const char* scales : {"tensor", "row"})
    for (const char* freeze : {"[]", "['blocks.0', 'blocks.*.attention']"})
      for (const auto& layout : layouts()) {
        auto overrides = fp8(scales, layout);
        overrides.insert(overrides.end(), {"run.device=cpu", fmt::format("train.freeze={}", freeze)});
        Config config = parse_config(models.at("gpt2") + common, "a.toml", overrides);
        resolve(config, 4);
        const auto predicted = predict_memory(config).state;
        testing::run_ranks(4, [&](World& world) {
          bonfire::Run run(world, config);
          std::int64_t held = 0, eight_bits = 0;
          for (const auto& flat : run.whole().engine.flats()) {
            held += static_cast<std::int64_t>(flat->held(0).storage().nbytes()) + 4 * flat->layout().scales();
            for (const auto& share : flat->trained()) {
              if (share.copy.defined()) held += static_cast<std::int64_t>(share.master.storage().nbytes());
              eight_bits += share.codec == plan::Codec::scaled ? share.copy.numel() : 0;
            }
          }
          EXPECT_GT(eight_bits, 0);
          EXPECT_EQ(predicted.parameters + predicted.masters, held) << fmt::format("{}, {}", scales, fmt::join(layout, " "));
        });
      }
}

// The demo's task on a smaller model: after the same steps the loss is within a percent of that in bf16.
TEST_F(Loop, Fp8LearnsWhatBf16Learns) {
  const std::string demo =
      "[model]\ntype = \"llama\"\ndim = 64\nlayers = 2\nheads = 4\nkv_heads = 2\nffn = 192\nvocab = 64\n"
      "[data]\nsequence = 64\nbranching = 4\n";
  const auto last = [&](const Overrides& precision) {
    Overrides all{"train.steps=120", "train.batch=8", "train.clip=1", "optimizer.lr=0.005", "optimizer.warmup=10"};
    all.insert(all.end(), precision.begin(), precision.end());
    const auto outcome = run_text(demo, 1, all);
    EXPECT_EQ(outcome.error, "");
    const auto losses = outcome.losses();
    return std::accumulate(losses.end() - 10, losses.end(), 0.0) / 10;
  };
  const double expected = last({"train.precision=bf16"});
  EXPECT_LT(expected, 2.5);  // of log(64) = 4.2 in the beginning
  for (const auto& [scaling, scales] : {std::pair{"delayed", "tensor"}, {"current", "row"}}) {
    const double loss = last(
        {"train.precision=fp8", fmt::format("train.fp8_scaling={}", scaling), fmt::format("train.fp8_scales={}", scales)});
    EXPECT_NEAR(loss, expected, 0.01 * expected) << scaling << ", " << scales;
  }
}

}  // namespace
}  // namespace bonfire::fp8_test
