// Runs that train low-rank adapters over the weights of another run.
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "bonfire/checkpoint/base_weights.h"
#include "bonfire/checkpoint/compare.h"
#include "bonfire/checkpoint/load.h"
#include "bonfire/checkpoint/peft.h"
#include "bonfire/checkpoint/reshard.h"
#include "bonfire/models/model.h"
#include "bonfire/plan/adapters.h"
#include "bonfire/plan/memory_table.h"
#include "bonfire/train/adapters.h"
#include "bonfire/train/build.h"
#include "bonfire/train/predict.h"
#include "bonfire/train/resume.h"
#include "bonfire/train/selection.h"
#include "bonfire/train/weights.h"
#include "bonfire/train/whole_model.h"
#include "tests/support/small_net.h"
#include "tests/support/thrown.h"
#include "tests/train/loop_fixture.h"
#include "tests/train/step_collectives.h"

namespace bonfire::adapter_runs_test {
namespace {

namespace fs = std::filesystem;
using testing::common;
using testing::expect_part;
using testing::Loop;
using testing::models;
using testing::Outcome;
using testing::thrown;
using Overrides = std::vector<std::string>;

class AdapterRuns : public Loop {
 protected:
  // A run whose weights are something else than what any run begins with.
  std::string base(const char* model) { return run(model, 1, {"train.steps=2"}).report.checkpoint; }

  static Overrides over(const std::string& base, Overrides more = {}) {
    more.insert(more.begin(), {"adapter.rank=3", "adapter.alpha=6", "checkpoint.weights=" + base});
    return more;
  }

  void expect_curve(const Outcome& seen, const Outcome& expected, const std::string& what) {
    EXPECT_EQ(seen.error, "") << what;
    ASSERT_EQ(seen.metrics.size(), expected.metrics.size()) << what;
    for (std::size_t step = 0; step < expected.metrics.size(); ++step)
      for (const char* key : {"loss", "grad_norm"}) {
        const double value = expected.metrics[step].at(key);
        EXPECT_NEAR(seen.metrics[step].at(key).get<double>(), value, 1e-5 * std::abs(value))
            << what << ", " << key << ", step " << step + 1;
      }
  }

  std::string refusal(const char* model, Overrides more, int ranks = 1) const {
    return thrown<ConfigError>([&] {
      Config config = parse_config(models.at(model) + common, "a.toml", more);
      resolve(config, ranks);
      check_weights(config, LookAt::files);
    });
  }
};

TEST_F(AdapterRuns, HaveTheCurveOfOneRankOnEveryLayout) {
  for (const char* model : {"llama", "gpt2"}) {
    const auto weights = base(model);
    const Overrides what =
        over(weights, {"adapter.dropout=0.2",
                       std::string("adapter.match=") +
                           (std::string(model) == "llama" ? "[\"q_proj\", \"v_proj\", \"layers.1.*.down_proj\"]" : "[]")});
    const auto expected = run(model, 1, what);
    EXPECT_EQ(expected.error, "");
    auto still = what;
    still.push_back("optimizer.lr=0");
    EXPECT_NE(expected.losses(), run(model, 1, still).losses()) << "nothing is trained";
    for (const auto& [ranks, layout] :
         std::vector<std::pair<int, Overrides>>{{2, {"layout.replicate=2"}},
                                                {2, {"layout.shard=2"}},
                                                {4, {"layout.shard=2", "layout.replicate=2", "train.microbatch=6"}},
                                                {4, {"layout.shard=4", "layout.sharded=optimizer"}},
                                                {2, {"layout.pipeline=2", "train.microbatch=12"}},
                                                {2, {"layout.pipeline=2", "layout.schedule=zb-h1", "train.microbatch=12"}},
                                                {4, {"layout.pipeline=2", "layout.shard=2", "train.microbatch=6"}}}) {
      Overrides more = what;
      more.insert(more.end(), layout.begin(), layout.end());
      expect_curve(run(model, ranks, more), expected, std::string(model) + " " + layout.front());
    }
  }
}

// Samples that ranks share, blocks that run again, and two bytes. The weights below are those that any run begins with.
TEST_F(AdapterRuns, HaveTheCurveOfOneRankWithOtherKindsOfLayers) {
  for (const char* model : {"llama", "gpt2"}) {
    const Overrides what{"adapter.rank=3", "checkpoint.every=0", "data.sequence=8"};
    const auto expected = run(model, 1, what);
    for (const auto& [ranks, layout] : std::vector<std::pair<int, Overrides>>{
             {2, {"layout.context=2"}},
             {2, {"layout.context=2", "layout.context_attention=heads"}},
             {4, {"layout.context=2", "layout.shard=2", "layout.recompute=full"}},
             {4, {"layout.context=2", "layout.pipeline=2", "train.microbatch=12"}},
             {2, {"layout.shard=2", "layout.recompute=full", "train.microbatch=6"}},
             {2, {"layout.pipeline=2", "layout.recompute=full", "train.microbatch=12"}}}) {
      Overrides more = what;
      more.insert(more.end(), layout.begin(), layout.end());
      expect_curve(run(model, ranks, more), expected, fmt::format("{} {}", model, fmt::join(layout, " ")));
    }
    // What runs again drops the same.
    for (const char* precision : {"fp32", "bf16"}) {
      Overrides dropping = what;
      dropping.insert(dropping.end(),
                      {"adapter.dropout=0.2", std::string("train.precision=") + precision, "layout.shard=2"});
      const auto plain = run(model, 2, dropping);
      EXPECT_LT(plain.losses().back(), plain.losses().front());
      dropping.push_back("layout.recompute=full");
      const auto again = run(model, 2, dropping);
      EXPECT_EQ(plain.error + again.error, "");
      EXPECT_EQ(again.losses(), plain.losses()) << model << " " << precision;
    }
  }
}

// Law 2.
TEST_F(AdapterRuns, StepsHaveExactlyTheCollectivesOfThePlan) {
  for (const char* model : {"llama", "gpt2"})
    for (const Overrides& layout :
         {Overrides{"layout.shard=4"},
          {"layout.shard=2", "layout.replicate=2", "layout.recompute=full", "train.precision=bf16"},
          {"layout.shard=2", "layout.context=2", "train.microbatch=12"},
          {"layout.context=4", "layout.recompute=full"},
          {"layout.pipeline=2", "layout.shard=2", "train.microbatch=6"},
          {"layout.pipeline=2", "layout.context=2", "layout.schedule=zb-h1", "train.microbatch=12"}}) {
      SCOPED_TRACE(fmt::format("{} {}", model, fmt::join(layout, " ")));
      Overrides all = layout;
      all.insert(all.end(), {"adapter.rank=3", "checkpoint.every=0", "data.sequence=8"});
      all.insert(all.end(), testing::traced_step.begin(), testing::traced_step.end());
      const auto outcome = run(model, 4, all);
      ASSERT_EQ(outcome.error, "");
      testing::expect_collectives_of_plan(outcome.folder, 4);
    }
}

TEST_F(AdapterRuns, GoOnAsStages) {
  const auto weights = base("llama");
  const auto with = [&](int steps, const Overrides& more) {
    Overrides all = over(weights, {"optimizer.decay=constant", "run.device=cpu", fmt::format("train.steps={}", steps)});
    all.insert(all.end(), more.begin(), more.end());
    return all;
  };
  const auto unbroken = run("llama", 1, with(6, {})), part = run("llama", 2, with(3, {"layout.shard=2"}));
  Config config = parse_config(models.at("llama") + common, "a.toml", with(6, {"layout.pipeline=2", "train.microbatch=12"}));
  resolve(config, 2);
  testing::run_ranks(2, [&](World& world) { train(world, config, {.folder = part.folder, .resume = true}); });
  std::ifstream in(part.folder / "metrics.jsonl");
  std::vector<double> losses;
  for (std::string line; std::getline(in, line);) losses.push_back(nlohmann::json::parse(line).at("loss"));
  ASSERT_EQ(losses.size(), 6u);
  for (std::size_t step = 0; step < 6; ++step)
    EXPECT_NEAR(losses[step], unbroken.losses().at(step), 1e-5 * losses[step]) << step;
}

// Nothing of a frozen weight is anywhere but the weight itself; what is predicted is what there is.
TEST_F(AdapterRuns, HoldGradientsAndOptimizerStateOfAdaptersAlone) {
  struct Case {
    Config config;
    std::int64_t adapters = 0, with_padding = 0;  // elements
  };
  std::vector<Case> cases;
  for (const char* model : {"llama", "gpt2", "mlp"})
    for (const auto& [shard, what] : testing::divisions())
      for (const char* precision : {"fp32", "bf16"}) {
        Config config =
            parse_config(models.at(model) + common, "a.toml",
                         {"run.device=cpu", "adapter.rank=3", fmt::format("layout.replicate={}", 4 / shard),
                          fmt::format("layout.shard={}", shard), fmt::format("layout.sharded={}", plan::name_of(what)),
                          fmt::format("train.precision={}", precision)});
        resolve(config, 4);
        std::int64_t adapters = 0, padding = 0;
        for (const auto& unit : plan::describe(config.model.spec).units) {
          padding += 4 * plan::segment_alignment;  // of each buffer, for each share of it
          for (const auto& parameter : unit.parameters)
            if (plan::is_adapter(parameter.name)) {
              adapters += parameter.elements();
              padding += plan::segment_alignment;
            }
        }
        cases.push_back({std::move(config), adapters, adapters + padding});
      }
  testing::run_ranks(4, [&](World& world) {
    for (const auto& [config, adapters, with_padding] : cases) {
      const auto predicted = predict_memory(config).state;
      bonfire::Run run(world, config);
      for (int step = 0; step < 2; ++step) {
        const auto batches = run.loader.next();
        run.whole().engine.backward(
            run.whole().model->loss(batches->microbatches.at(0).input, batches->microbatches.at(0).target));
        run.whole().optimizer->step({});
      }
      std::int64_t gradients = 0, parameters = 0;
      for (const auto& flat : run.whole().engine.flats()) {
        parameters += static_cast<std::int64_t>(flat->held(0).storage().nbytes());
        for (const auto& share : flat->trained()) {
          if (share.low_precision().defined()) parameters += static_cast<std::int64_t>(share.master.storage().nbytes());
          gradients += static_cast<std::int64_t>(share.gradient.storage().nbytes());
        }
      }
      const std::string what = fmt::format("{}, F = {}, {}, {}", config.model.type, config.layout.shard,
                                           config.layout.sharded, config.train.precision);
      EXPECT_EQ(predicted.parameters + predicted.masters, parameters) << what;
      EXPECT_EQ(predicted.gradients, gradients) << what;
      EXPECT_EQ(predicted.optimizer, run.whole().optimizer->state_bytes()) << what;
      const std::int64_t each = 2 * 4 / config.layout.shard;  // two numbers in fp32
      EXPECT_GE(run.whole().optimizer->state_bytes(), each * adapters) << what;
      EXPECT_LE(run.whole().optimizer->state_bytes(), each * with_padding) << what;
    }
  });
}

TEST_F(AdapterRuns, SaveTheAdaptersAndTheNameOfTheRest) {
  const auto weights = base("llama");
  for (const auto& layout :
       {Overrides{}, Overrides{"layout.shard=2"}, Overrides{"layout.pipeline=2", "train.microbatch=24"}}) {
    const auto saved = run("llama", 2, over(weights, layout)).report.checkpoint;
    const auto manifest = read_manifest(saved);
    for (const auto& tensor : manifest.tensors)
      if (tensor.kind == "value" || tensor.kind == "exp_avg") {
        EXPECT_TRUE(plan::is_adapter(tensor.name)) << tensor.name;
      }
    EXPECT_NE(manifest.find("blocks.1.attention.qkv.adapters.v_proj.b", "value"), nullptr);
    EXPECT_EQ(base_of(saved).checksum, checksum_of_weights(weights));
    EXPECT_EQ(base_of(saved).folder, weights);
  }
}

TEST_F(AdapterRuns, GoOnToTheSameBitAndOverNothingElse) {
  const auto weights = base("llama"), others = run("llama", 1, {"train.seed=2"}).report.checkpoint;
  const Overrides what = over(weights, {"optimizer.decay=constant", "layout.shard=2"});
  const auto with = [&](int steps) {
    auto more = what;
    more.push_back(fmt::format("train.steps={}", steps));
    return more;
  };
  const auto unbroken = run("llama", 2, with(6)), part = run("llama", 2, with(3));
  const auto go_on = [&](Overrides more) {
    more.push_back("run.device=cpu");
    Config config = parse_config(models.at("llama") + common, "a.toml", more);
    resolve(config, 2);
    testing::run_ranks(2, [&](World& world) { train(world, config, {.folder = part.folder, .resume = true}); });
  };
  auto wrong = with(6);
  wrong.push_back("checkpoint.weights=" + others);
  expect_part(thrown<ConfigError>([&] { go_on(wrong); }), "the checkpoint is over other weights: those of '" + others);
  const auto resumed = [&](const Overrides& overrides) {
    return thrown<ConfigError>([&] {
      Config config = parse_config(models.at("llama") + common, "a.toml", overrides);
      resolve(config, 2);
      require_resumable(config, find_resume(config, part.folder.string()), LookAt::files);
    });
  };
  EXPECT_EQ(resumed(with(6)), "");
  expect_part(resumed(wrong), "checkpoint.weights = ");
  expect_part(resumed(wrong), "the checkpoint is over other weights");
  auto wider = with(6);
  wider.push_back("adapter.rank=4");
  expect_part(resumed(wider), "adapter.rank = 4");

  // The same weights elsewhere, in other files.
  const auto moved = (scratch_.path() / "moved").string();
  reshard_checkpoint(weights, moved, {.parts = 3});
  EXPECT_EQ(checksum_of_weights(moved), checksum_of_weights(weights));
  auto same = with(6);
  same.push_back("checkpoint.weights=" + moved);
  go_on(same);
  std::ifstream in(part.folder / "metrics.jsonl");
  std::vector<double> losses;
  for (std::string line; std::getline(in, line);) losses.push_back(nlohmann::json::parse(line).at("loss"));
  EXPECT_EQ(losses, unbroken.losses());
}

// Out as PEFT's files and in again, and merged into the weights: the same function.
TEST_F(AdapterRuns, MergedAndExportedAreTheAdaptedModel) {
  for (const char* model : {"llama", "gpt2"}) {
    SCOPED_TRACE(model);
    const auto weights = base(model);
    const auto trained = run(model, 2, over(weights, {"layout.shard=2", "train.steps=8"})).report.checkpoint;
    const auto folder = (scratch_.path() / (std::string(model) + "-peft")).string(),
               merged = (scratch_.path() / (std::string(model) + "-merged")).string(), merged_of_peft = merged + "-of-peft";
    export_adapters(trained, folder);
    EXPECT_EQ(merge_adapters(trained, merged, {}), std::string(model) == "llama" ? 14 : 8);
    merge_adapters(folder, merged_of_peft, {.base = weights});
    EXPECT_TRUE(compare_checkpoints(merged, merged_of_peft).empty());
    EXPECT_FALSE(compare_checkpoints(merged, weights).empty());
    EXPECT_EQ(verify_checkpoint(merged), std::vector<std::string>());

    const Overrides still{"optimizer.lr=0", "train.steps=2"};
    auto adapted = over(weights, still), plain = still, fresh = over(weights, still);
    adapted.push_back("adapter.weights=" + folder);
    plain.push_back("checkpoint.weights=" + merged);
    const auto first = run(model, 2, adapted), second = run(model, 1, plain), third = run(model, 1, fresh);
    EXPECT_EQ(first.error + second.error + third.error, "");
    for (std::size_t step = 0; step < 2; ++step) {
      const double value = second.losses().at(step);
      EXPECT_NEAR(first.losses().at(step), value, 1e-6 * value);
      EXPECT_GT(std::abs(third.losses().at(step) - value), 1e-3 * value);
    }
  }
}

TEST_F(AdapterRuns, WhatDoesNotFitIsRefused) {
  const auto weights = base("llama");
  EXPECT_EQ(refusal("llama", over(weights)), "");
  EXPECT_EQ(refusal("llama", {"adapter.rank=3", "checkpoint.every=0"}), "");
  expect_part(refusal("llama", {"adapter.rank=3"}), "checkpoint.weights = \"\" (the default): adapters are trained over");
  expect_part(refusal("llama", over(weights, {"adapter.match=[\"q_proj\", \"query\"]"})),
              "--set adapter.match=[\"q_proj\", \"query\"]: adapter.match holds \"query\", which names no linear layer of "
              "this model; allowed: down_proj | gate_proj");
  expect_part(refusal("llama", {"adapter.alpha=3"}), "there are no adapters");
  expect_part(refusal("llama", over(weights, {"checkpoint.weights_of=[\"blocks\"]"})), "checkpoint.weights_of = ");
  expect_part(refusal("llama", over(weights, {"layout.tensor=2"}), 2),
              "adapter.rank is 3: layers that 2 ranks split have no adapters");
  expect_part(refusal("llama", over(weights, {"model.ffn=32"})), "the checkpoint is not of this model");
  expect_part(refusal("llama", over(weights, {"adapter.weights=" + scratch_.path().string()})),
              "there is no adapter_config.json");
  const auto trained = run("llama", 1, over(weights)).report.checkpoint;
  const auto folder = (scratch_.path() / "peft").string();
  export_adapters(trained, folder);
  EXPECT_EQ(refusal("llama", over(weights, {"adapter.weights=" + folder})), "");
  expect_part(refusal("llama", over(weights, {"adapter.weights=" + folder, "adapter.rank=4"})),
              "is of rank 3; adapter.rank");
  expect_part(refusal("llama", over(weights, {"adapter.weights=" + folder, "adapter.match=[\"q_proj\"]"})),
              "there are adapters that this run does not have: base_model.model.model.layers.0.");
  expect_part(refusal("llama", over(weights, {"adapter.weights=" + folder, "adapter.match=[\"*_proj\", \"lm_head\"]"})),
              "missing: base_model.model.lm_head.lora_A.weight and 1 others");
  // The weights below are not a checkpoint of adapters, and a merge is over the right ones.
  expect_part(refusal("llama", over(trained)), "missing in the checkpoint: ");
  const auto to = (scratch_.path() / "none").string(), others = run("llama", 1, {"train.seed=2"}).report.checkpoint;
  expect_part(thrown<ConfigError>([&] { merge_adapters(trained, to, {.base = others}); }), "is over other weights");
  expect_part(thrown<ConfigError>([&] { merge_adapters(folder, to, {}); }), "name them with --base");
  expect_part(thrown<ConfigError>([&] { export_adapters(weights, to); }), "its run has no adapters");
  expect_part(thrown<ConfigError>([&] { export_adapters(trained, folder); }), "exists already");
  EXPECT_FALSE(fs::exists(to));
}

TEST_F(AdapterRuns, PeftsOtherKindsAreRefused) {
  const auto write = [&](const std::string& config) {
    std::ofstream(scratch_.path() / peft_config_name) << config;
    return thrown<ConfigError>([&] { read_peft(scratch_.path()); });
  };
  expect_part(write(R"({"peft_type": "IA3", "r": 4, "lora_alpha": 8})"), "peft_type is \"IA3\"; allowed: LORA");
  expect_part(write(R"({"peft_type": "LORA", "r": 4, "lora_alpha": 8, "use_dora": true})"), "use_dora is not available");
  expect_part(write(R"({"peft_type": "LORA", "r": 4, "lora_alpha": 8, "rank_pattern": {"q": 2}})"), "rank_pattern is not");
  expect_part(write(R"({"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "all"})"), "bias is \"all\"; allowed: none");
  expect_part(write(R"({"peft_type": "LORA", "r": "four", "lora_alpha": 8})"), "must be an integer");
}

}  // namespace
}  // namespace bonfire::adapter_runs_test
