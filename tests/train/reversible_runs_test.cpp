// Runs of reversible models.
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "bonfire/models/model.h"
#include "bonfire/train/build.h"
#include "bonfire/train/predict.h"
#include "bonfire/train/whole_model.h"
#include "tests/support/ranks.h"
#include "tests/train/loop_fixture.h"
#include "tests/train/step_collectives.h"

namespace bonfire::reversible_runs_test {
namespace {

using testing::common;
using testing::Loop;
using testing::models;
using Overrides = std::vector<std::string>;

class ReversibleRuns : public Loop {};

TEST_F(ReversibleRuns, HaveTheCurveOfOneRankOnEveryLayout) {
  for (const char* model : {"llama", "gpt2"}) {
    Overrides what{"model.reversible=true", "train.eval_every=2"};
    if (std::string(model) == "gpt2") what.push_back("model.dropout=0.1");
    const auto expected = run(model, 1, what);
    EXPECT_EQ(expected.error, "");
    EXPECT_LT(expected.losses().back(), expected.losses().front());
    for (const auto& [ranks, layout] : std::vector<std::pair<int, Overrides>>{
             {2, {"layout.replicate=2", "train.microbatch=6"}},
             {2, {"layout.shard=2"}},
             {4, {"layout.shard=2", "layout.replicate=2", "layout.reshard_after_forward=false"}},
             {2, {"layout.pipeline=2", "train.microbatch=12"}},
             {2, {"layout.pipeline=2", "layout.schedule=zb-h1", "train.microbatch=12"}},
             {2, {"layout.pipeline=2", "layout.schedule=interleaved", "train.microbatch=12"}},
             {4, {"layout.pipeline=2", "layout.shard=2", "layout.schedule=zb-v", "train.microbatch=6"}}}) {
      Overrides more = what;
      more.insert(more.end(), layout.begin(), layout.end());
      const auto seen = run(model, ranks, more);
      const std::string name = std::string(model) + " " + layout.front() + " " + layout.back();
      EXPECT_EQ(seen.error, "") << name;
      ASSERT_EQ(seen.metrics.size(), expected.metrics.size()) << name;
      for (std::size_t step = 0; step < expected.metrics.size(); ++step)
        for (const char* key : {"loss", "grad_norm", "eval_loss"}) {
          if (!expected.metrics[step].contains(key)) continue;
          const double value = expected.metrics[step].at(key);
          EXPECT_NEAR(seen.metrics[step].at(key).get<double>(), value, 1e-5 * std::abs(value))
              << name << ", " << key << ", step " << step + 1;
        }
    }
  }
}

// In two bytes an input that is made again differs by a rounding, which layouts do not change.
TEST_F(ReversibleRuns, TrainInTwoBytesOnEveryLayout) {
  for (const char* model : {"llama", "gpt2"}) {
    const Overrides what{"model.reversible=true", "train.precision=bf16", "train.steps=8"};
    const auto expected = run(model, 1, what);
    EXPECT_EQ(expected.error, "");
    EXPECT_LT(expected.losses().back(), expected.losses().front());
    for (const auto& [ranks, layout] : std::vector<std::pair<int, Overrides>>{
             {2, {"layout.shard=2"}}, {2, {"layout.pipeline=2", "train.microbatch=12"}}}) {
      Overrides more = what;
      more.insert(more.end(), layout.begin(), layout.end());
      const auto seen = run(model, ranks, more);
      EXPECT_EQ(seen.error, "");
      ASSERT_EQ(seen.metrics.size(), expected.metrics.size());
      for (std::size_t step = 0; step < expected.metrics.size(); ++step)
        EXPECT_NEAR(seen.losses()[step], expected.losses()[step], 0.01 * expected.losses()[step]) << model << " " << step;
    }
  }
}

// Law 2.
TEST_F(ReversibleRuns, StepsHaveExactlyTheCollectivesOfThePlan) {
  for (const char* model : {"llama", "gpt2"})
    for (const Overrides& layout :
         {Overrides{"layout.shard=2", "layout.replicate=2", "train.microbatch=6"},
          {"layout.shard=4", "train.precision=bf16"},
          {"layout.shard=4", "layout.reshard_after_forward=false"},
          {"layout.pipeline=2", "layout.shard=2", "train.microbatch=6"},
          {"layout.pipeline=2", "layout.shard=2", "layout.schedule=zb-h1", "train.microbatch=6"}}) {
      SCOPED_TRACE(fmt::format("{} {}", model, fmt::join(layout, " ")));
      Overrides all = layout;
      all.push_back("model.reversible=true");
      all.insert(all.end(), testing::traced_step.begin(), testing::traced_step.end());
      const auto outcome = run(model, 4, all);
      ASSERT_EQ(outcome.error, "");
      testing::expect_collectives_of_plan(outcome.folder, 4);
    }
}

// A run that is saved and goes on, also on another layout.
TEST_F(ReversibleRuns, GoOnWhereTheyWere) {
  const Overrides what{"model.reversible=true", "optimizer.decay=constant", "layout.shard=2"};
  const auto with = [&](int steps, const Overrides& more = {}) {
    Overrides all = what;
    all.push_back(fmt::format("train.steps={}", steps));
    all.insert(all.end(), more.begin(), more.end());
    return all;
  };
  const auto unbroken = run("llama", 2, with(6)), part = run("llama", 2, with(3));
  const auto go_on = [&](const Overrides& overrides) {
    Overrides all = overrides;
    all.push_back("run.device=cpu");
    Config config = parse_config(models.at("llama") + common, "a.toml", all);
    resolve(config, 2);
    testing::run_ranks(2, [&](World& world) { train(world, config, {.folder = part.folder, .resume = true}); });
  };
  go_on(with(4));
  go_on(with(6, {"layout.shard=1", "layout.pipeline=2", "train.microbatch=12"}));
  std::ifstream in(part.folder / "metrics.jsonl");
  std::vector<double> losses;
  for (std::string line; std::getline(in, line);) losses.push_back(nlohmann::json::parse(line).at("loss"));
  ASSERT_EQ(losses.size(), 6u);
  for (std::size_t step = 0; step < 6; ++step) {
    const double value = unbroken.losses().at(step);
    EXPECT_NEAR(losses[step], value, step < 4 ? 0 : 1e-5 * value) << step;
  }
}

// Beside what the model itself holds, a step of 64 blocks needs what a step of 4 needs, and that is what is predicted.
TEST_F(ReversibleRuns, ActivationsDoNotGrowWithDepth) {
  struct Seen {
    std::int64_t activations = 0, predicted = 0;
  };
  const auto measure = [&](const char* type, int layers, bool reversible) {
    Config config = parse_config(
        fmt::format(
            "[model]\ntype = \"{}\"\ndim = 32\nlayers = {}\nheads = 2\nffn = 64\nvocab = 40\nreversible = {}\n[data]\n"
            "sequence = 128\nbranching = 4\n",
            type, layers, reversible) +
            "[train]\nbatch = 8\n",
        "a.toml", {"run.device=cpu", "checkpoint.every=0", "run.threads=1"});
    resolve(config, 1);
    const auto predicted = predict_memory(config);
    Seen seen{.predicted = predicted.activations};
    testing::run_ranks(1, [&](World& world) {
      bonfire::Run run(world, config);
      for (int step = 0; step < 3; ++step) {
        const auto batches = run.loader.next();
        const auto& batch = batches->microbatches.at(0);
        run.whole().engine.backward(run.whole().model->loss(batch.input, batch.target));
        run.whole().optimizer->step({});
      }
      seen.activations = run.memory.peak() - (predicted.step() - predicted.activations);
    });
    return seen;
  };
  for (const char* type : {"llama", "gpt2"}) {
    const auto few = measure(type, 4, true), many = measure(type, 64, true);
    EXPECT_EQ(few.predicted, many.predicted) << type;
    const auto allowed = 0.05 * static_cast<double>(few.predicted);
    EXPECT_NEAR(static_cast<double>(few.activations), static_cast<double>(few.predicted), allowed) << type;
    EXPECT_NEAR(static_cast<double>(many.activations), static_cast<double>(many.predicted), allowed) << type;
    EXPECT_GT(measure(type, 64, false).activations, 8 * many.activations) << type;
  }
}

}  // namespace
}  // namespace bonfire::reversible_runs_test
