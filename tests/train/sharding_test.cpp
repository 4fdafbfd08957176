#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>

#include <fmt/ranges.h>

#include "bonfire/data/token_writer.h"
#include "bonfire/plan/layout.h"
#include "bonfire/train/predict.h"
#include "bonfire/train/selection.h"
#include "tests/train/loop_fixture.h"
#include "tests/train/step_collectives.h"

// The real loop with every setting of the sharding, against one rank.
namespace bonfire::sharding_test {
namespace {
using testing::common;
using testing::Loop;
using testing::models;
using testing::planned_collectives;
using testing::traced_collectives;

using Overrides = std::vector<std::string>;

void add(Overrides& all, const Overrides& more) { all.insert(all.end(), more.begin(), more.end()); }

void expect_near(const std::vector<double>& seen, const std::vector<double>& expected, const std::string& what) {
  ASSERT_EQ(seen.size(), expected.size()) << what;
  for (std::size_t step = 0; step < seen.size(); ++step)
    EXPECT_NEAR(seen[step], expected[step], 1e-5 * std::abs(expected[step])) << what << ", step " << step + 1;
}

class Sharding : public Loop, public ::testing::WithParamInterface<std::string> {};

TEST_P(Sharding, EveryFactorHasTheLossesOfOneRank) {
  const auto expected = run(GetParam(), 1).losses();
  ASSERT_EQ(expected.size(), 4u);
  for (const char* what : {"optimizer", "gradients", "parameters"}) {
    for (const auto& [replicate, shard] : {std::pair{1, 2}, {1, 3}, {1, 4}, {2, 2}}) {
      const int ranks = replicate * shard;
      const Overrides layout = {fmt::format("layout.replicate={}", replicate), fmt::format("layout.shard={}", shard),
                                std::string("layout.sharded=") + what,
                                fmt::format("train.microbatch={}", 48 / ranks / (shard == 2 ? 2 : 1))};
      const auto outcome = run(GetParam(), ranks, layout);
      EXPECT_EQ(outcome.error, "");
      expect_near(outcome.losses(), expected, fmt::format("{} x {} ranks, {}", replicate, shard, what));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Models, Sharding, ::testing::Values("llama", "gpt2", "mlp", "vgg"),
                         [](const auto& info) { return info.param; });

struct Setting {
  const char* name;
  Overrides sharded;  // beside shard = 4, sharded = parameters
  Overrides both = {};
};

const std::vector<Setting>& settings() {
  static const std::vector<Setting> all = {
      {"keep", {"layout.reshard_after_forward=false"}},
      {"kept_among_two", {"layout.reshard_after_forward=2"}},
      {"no_prefetch", {"layout.prefetch=0"}},
      {"after", {"layout.backward_prefetch=after", "layout.prefetch=1"}},
      {"full_accumulation", {"layout.accumulation=full", "train.microbatch=4"}},
      {"sharded_accumulation", {"train.microbatch=4"}},
      {"all_in_one", {"layout.wrap=all"}},
      {"large_units", {"layout.wrap=1000"}},
      {"blocks", {"layout.wrap_types=[\"block\"]", "train.microbatch=4"}},
      {"offloaded_optimizer", {"layout.offload=optimizer"}},
      {"offloaded_parameters", {"layout.offload=parameters"}},
      {"frozen", {}, {"train.freeze=[\"embedding\", \"blocks.0\", \"blocks.1.feed\"]"}},
      {"frozen_head", {"layout.wrap=all"}, {"train.freeze=[\"head\"]"}},
      {"ignored", {}, {"layout.ignore=[\"blocks.0.feed\", \"head.norm.bias\"]"}},
      {"ignored_unit", {"layout.wrap=1000"}, {"layout.ignore=[\"blocks.0\", \"embedding\"]"}},
      {"ignored_and_tied", {}, {"layout.ignore=[\"tokens\"]"}},
      {"groups",
       {},
       {"optimizer.group=[{match=\"norms\", weight_decay=0}, {match=[\"blocks.0\", \"biases\"], lr=0.002, "
        "weight_decay=0.5}]"}},
      {"broadcast", {"train.start=broadcast"}},
      {"debug", {"run.debug_parameters=true"}},
      {"clipped", {}, {"train.clip_value=0.001", "train.clip=0.01"}},
      {"small_buckets", {"layout.sharded=gradients", "layout.first_bucket_mb=0.001", "layout.bucket_mb=0.003"}},
  };
  return all;
}

class Settings : public Loop, public ::testing::WithParamInterface<Setting> {};

TEST_P(Settings, ChangeNoLoss) {
  const auto expected = run("gpt2", 1, GetParam().both);
  ASSERT_EQ(expected.losses().size(), 4u) << expected.error;
  Overrides sharded = {"layout.shard=4"};
  add(sharded, GetParam().sharded);
  add(sharded, GetParam().both);
  const auto outcome = run("gpt2", 4, sharded);
  EXPECT_EQ(outcome.error, "");
  expect_near(outcome.losses(), expected.losses(), GetParam().name);
  for (std::size_t step = 0; step < outcome.metrics.size(); ++step) {
    const double norm = expected.metrics[step].at("grad_norm");
    EXPECT_NEAR(outcome.metrics[step].at("grad_norm").get<double>(), norm, 1e-4 * norm) << GetParam().name;
  }
}

// Law 2 through the configuration: what plan lists is what a traced step of the real loop did.
TEST_P(Settings, HaveExactlyTheCollectivesOfThePlan) {
  Overrides sharded = {"layout.shard=4", "train.trace_from=3", "train.trace_steps=1"};
  add(sharded, GetParam().sharded);
  add(sharded, GetParam().both);
  const auto outcome = run("gpt2", 4, sharded);
  ASSERT_EQ(outcome.error, "");
  Config config = parse_config(models.at("gpt2") + common, "a.toml", sharded);
  resolve(config, 4);
  const auto expected = planned_collectives(wrapped_model_of(config), data_parallel_of(config));
  EXPECT_GT(expected.size(), 3u);
  EXPECT_EQ(traced_collectives(outcome.folder), expected) << GetParam().name;
}

INSTANTIATE_TEST_SUITE_P(Sharded, Settings, ::testing::ValuesIn(settings()),
                         [](const auto& info) { return std::string(info.param.name); });

TEST_F(Loop, FrozenParametersChangeTheRunAndCostNothing) {
  const auto all = run("gpt2", 1), some = run("gpt2", 1, {"train.freeze=[\"blocks\"]"});
  EXPECT_EQ(all.losses().front(), some.losses().front());
  EXPECT_NE(all.losses().back(), some.losses().back());
  EXPECT_LT(some.report.predicted_memory_bytes, all.report.predicted_memory_bytes);
  EXPECT_LT(some.report.peak_memory_bytes, all.report.peak_memory_bytes);
}

// What is ignored is as good as frozen, and stays whole.
TEST_F(Loop, WhatIsIgnoredIsNotTrained) {
  const auto frozen = run("gpt2", 1, {"train.freeze=[\"blocks.0\"]"}),
             ignored = run("gpt2", 1, {"layout.ignore=[\"blocks.0\"]"});
  EXPECT_EQ(ignored.losses(), frozen.losses());
  EXPECT_NEAR(ignored.report.predicted_memory_bytes, ignored.report.peak_memory_bytes,
              0.05 * ignored.report.peak_memory_bytes);
  // The meter counts both ranks, which need not be at their peaks at once.
  const auto half = run("gpt2", 2, {"layout.shard=2", "layout.ignore=[\"blocks.0\"]"});
  EXPECT_LE(half.report.peak_memory_bytes, 2.1 * half.report.predicted_memory_bytes);
  EXPECT_GE(half.report.peak_memory_bytes, half.report.predicted_memory_bytes);
}

// A group has the settings that a whole run could have.
TEST_F(Loop, GroupsHaveSettingsOfTheirOwn) {
  const Overrides plain = {"train.clip=0", "optimizer.weight_decay=0.1"};
  const auto with = [&](const Overrides& more) {
    auto all = plain;
    add(all, more);
    const auto outcome = run("gpt2", 1, all);
    EXPECT_EQ(outcome.error, "");
    return outcome.losses();
  };
  const auto as_it_is = with({});
  expect_near(with({"optimizer.group=[{match=\"blocks\", lr=0, weight_decay=0.3}]"}), with({"train.freeze=[\"blocks\"]"}),
              "no learning rate");
  const char* everything = "[\"tokens\", \"embedding\", \"blocks\", \"head\"]";
  EXPECT_EQ(with({fmt::format("optimizer.group=[{{match={}, lr=0.02, weight_decay=0.7}}]", everything)}),
            with({"optimizer.lr=0.02", "optimizer.weight_decay=0.7"}));
  EXPECT_EQ(with({fmt::format("optimizer.group=[{{match={}, lr=0.02}}]", everything)}), with({"optimizer.lr=0.02"}));
  EXPECT_EQ(with({fmt::format("optimizer.group=[{{match={}, lr=0.01}}, {{match=\"blocks\", lr=0}}]", everything)}), as_it_is)
      << "the first that matches decides";
  EXPECT_NE(with({"optimizer.group=[{match=\"norms\", lr=0.1}]"}), as_it_is);
  EXPECT_NE(with({"optimizer.group=[{match=\"biases\", lr=0.1}]"}), with({"optimizer.group=[{match=\"norms\", lr=0.1}]"}));
}

TEST_F(Loop, WhateverMayStayInFp32Trains) {
  for (const char* model : {"llama", "gpt2", "mlp"})
    for (const char* kept : {"norms", "embeddings"}) {
      if (std::string(model) == "mlp" && std::string(kept) == "norms") continue;
      Overrides overrides = {"train.precision=bf16", fmt::format("train.keep_fp32=[\"{}\"]", kept), "layout.shard=2"};
      if (std::string(model) != "mlp") overrides.push_back("model.tied=false");
      const auto outcome = run(model, 2, overrides);
      EXPECT_EQ(outcome.error, "") << model << ", " << kept;
    }
}

TEST_F(Loop, OutputsAreRounded) {
  const auto own = run("llama", 1).losses(), rounded = run("llama", 1, {"train.output_precision=bf16"}).losses();
  const auto has_eight_bits = [](double value) {
    int exponent;
    const double mantissa = std::ldexp(std::frexp(value, &exponent), 8);
    return mantissa == std::floor(mantissa);
  };
  EXPECT_FALSE(std::all_of(own.begin(), own.end(), has_eight_bits));
  EXPECT_TRUE(std::all_of(rounded.begin(), rounded.end(), has_eight_bits));
}

TEST_F(Loop, OrdersMayBeNegotiated) {
  const auto outcome = run("gpt2", 4, {"layout.shard=4", "layout.negotiate_order=true"});
  EXPECT_EQ(outcome.error, "");
  expect_near(outcome.losses(), run("gpt2", 1).losses(), "negotiated");
}

TEST_F(Loop, PrecisionsOfEveryPartTrainSharded) {
  const auto expected = run("llama", 1).losses();
  for (const Overrides& precision : {Overrides{"train.precision=bf16"},
                                     {"train.precision=bf16", "train.gradient_precision=bf16"},
                                     {"train.precision=bf16", "train.reduction_precision=bf16"},
                                     {"train.precision=bf16", "train.keep_fp32=[\"norms\", \"embeddings\"]"},
                                     {"train.precision=fp16"},
                                     {"train.precision=fp16", "train.gradient_precision=fp16", "optimizer.loss_scale=1024"},
                                     {"train.reduction_precision=bf16"},
                                     {"layout.compression=fp16"}}) {
    for (const auto& [replicate, shard] : {std::pair{1, 2}, {2, 1}, {2, 2}}) {
      Overrides overrides = {fmt::format("layout.replicate={}", replicate), fmt::format("layout.shard={}", shard),
                             "train.microbatch=6"};
      add(overrides, precision);
      const auto outcome = run("llama", replicate * shard, overrides);
      const auto what = fmt::format("{} x {}, {}", replicate, shard, fmt::join(precision, " "));
      ASSERT_EQ(outcome.losses().size(), 4u) << what << ": " << outcome.error;
      for (std::size_t i = 0; i < 4; ++i) EXPECT_NEAR(outcome.losses()[i], expected[i], 0.02 * expected[i]) << what;
      EXPECT_EQ(outcome.report.skipped, 0) << what;
    }
  }
}

// What is not finite, or found to overflow by the scaler, ends or skips the step on all ranks alike.
TEST_F(Loop, ShardedRanksSkipTogether) {
  const auto scaled =
      run("llama", 4, {"layout.shard=4", "train.precision=fp16", "optimizer.loss_scale=1e9", "train.steps=30"});
  EXPECT_GT(scaled.report.skipped, 0) << scaled.error;
  EXPECT_LT(scaled.report.skipped, 30);
  EXPECT_LT(scaled.losses().back(), scaled.losses().front());
  const auto stopped = run("llama", 2, {"layout.shard=2", "fault.nan_step=2", "fault.nan_rank=1"});
  EXPECT_NE(stopped.error.find("step 2: the loss is nan, from rank 1"), std::string::npos) << stopped.error;
}

TEST_F(Loop, EvaluationUnderShardingIsThatOfOneRank) {
  // 47 windows of 6 tokens; the held-out part is 23 of them, in batches of 12: the last one is uneven, and with 4 ranks in
  // microbatches of 1 some run out before the others.
  const auto path = scratch_ / "tokens.bin";
  {
    TokenWriter writer({.path = path, .vocab = 40});
    std::vector<std::int64_t> tokens(47 * 6 + 1);
    for (std::size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<std::int64_t>(i * i * 7 % 40);
    writer.append(tokens);
    writer.finish();
  }
  for (const char* tied : {"model.tied=true", "model.tied=false"}) {
    for (const char* model : {"gpt2", "llama"}) {
      const Overrides common_keys = {tied,
                                     "data.type=tokens",
                                     "data.paths=[\"" + path + "\"]",
                                     "data.held_out=0.5",
                                     "train.batch=12",
                                     "train.eval_every=2",
                                     "train.eval_batches=9"};
      auto tokens_of = [&](const std::string& name) {
        // `branching` belongs to synthetic data.
        auto text = models.at(name);
        return text.substr(0, text.find("branching"));
      };
      const auto one = run_text(tokens_of(model), 1, common_keys);
      ASSERT_EQ(one.metrics.size(), 4u) << one.error;
      for (const Overrides& layout : {Overrides{"layout.shard=2"},
                                      {"layout.shard=4", "train.microbatch=1"},
                                      {"layout.shard=2", "layout.replicate=2", "train.microbatch=1"},
                                      {"layout.shard=4", "train.microbatch=1", "layout.reshard_after_forward=false"},
                                      {"layout.shard=4", "train.microbatch=1", "layout.sharded=optimizer"}}) {
        auto overrides = common_keys;
        add(overrides, layout);
        const int ranks = layout[0] == "layout.shard=2" && layout.size() == 1 ? 2 : 4;
        const auto outcome = run_text(tokens_of(model), ranks, overrides);
        const auto what = fmt::format("{} {} {}", model, tied, fmt::join(layout, " "));
        ASSERT_EQ(outcome.error, "") << what;
        expect_near(outcome.losses(), one.losses(), what);
        for (const std::size_t step : {1, 3}) {
          const double expected = one.metrics[step].at("eval_loss");
          EXPECT_NEAR(outcome.metrics[step].at("eval_loss").get<double>(), expected, 1e-5 * expected) << what;
        }
      }
    }
  }
  std::filesystem::remove(path);
}

// Gathers do not queue behind reductions: they have a track of their own.
TEST_F(Loop, TheTraceShowsGathersOnATrackOfTheirOwn) {
  const auto outcome = run("llama", 2, {"layout.shard=2", "train.trace_steps=2", "train.trace_from=3"});
  const auto trace = nlohmann::json::parse(std::ifstream(outcome.folder / "trace.json"));
  std::map<std::pair<int, int>, std::string> tracks;
  for (const auto& event : trace.at("traceEvents"))
    if (event.at("ph") == "M" && event.at("name") == "thread_name")
      tracks[{event.at("pid"), event.at("tid")}] = event.at("args").at("name");
  std::map<std::string, std::set<std::string>> seen;
  for (const auto& event : trace.at("traceEvents"))
    if (event.at("ph") == "X") seen[event.at("name")].insert(tracks.at({event.at("pid"), event.at("tid")}));
  EXPECT_EQ(seen["all_gather"], (std::set<std::string>{"gloo shard gathers"}));
  EXPECT_EQ(seen["reduce_scatter"], (std::set<std::string>{"gloo shard"}));
}

}  // namespace
}  // namespace bonfire::sharding_test
