#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <iterator>
#include <map>
#include <set>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "bonfire/plan/layout.h"
#include "bonfire/train/predict.h"
#include "tests/train/loop_fixture.h"
#include "tests/train/step_collectives.h"

namespace bonfire::loop_test {
namespace {
namespace fs = std::filesystem;
using testing::common;
using testing::Loop;
using testing::models;
using testing::planned_collectives;
using testing::traced_collectives;

class Parity : public Loop, public ::testing::WithParamInterface<std::string> {};

TEST_P(Parity, EveryLayoutHasTheLossesOfOneRank) {
  const auto expected = run(GetParam(), 1).losses();
  ASSERT_EQ(expected.size(), 4u);
  EXPECT_NE(expected.front(), expected.back());
  for (int ranks = 1; ranks <= 4; ++ranks) {
    for (const int parts : {1, 4}) {
      const auto losses = run(GetParam(), ranks, {fmt::format("train.microbatch={}", 48 / ranks / parts)}).losses();
      ASSERT_EQ(losses.size(), expected.size());
      for (std::size_t step = 0; step < losses.size(); ++step) {
        EXPECT_NEAR(losses[step], expected[step], 1e-5 * std::abs(expected[step]))
            << ranks << " ranks, " << parts << " microbatches, step " << step + 1;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Models, Parity, ::testing::Values("llama", "gpt2", "mlp", "vgg"),
                         [](const auto& info) { return info.param; });

TEST_F(Loop, TwoRunsOfOneLayoutHaveEqualBits) {
  const auto one = run("llama", 2, {"train.microbatch=6"}), two = run("llama", 2, {"train.microbatch=6"});
  EXPECT_EQ(one.losses(), two.losses());
  EXPECT_EQ(one.metrics.back().at("grad_norm"), two.metrics.back().at("grad_norm"));
  EXPECT_NE(one.losses(), run("llama", 2, {"train.microbatch=6", "train.seed=2"}).losses());
}

TEST_F(Loop, EachLineOfMetricsHasTheKeysThatScriptsRelyOn) {
  const auto outcome = run("llama", 2, {"train.eval_every=2", "train.eval_batches=2"});
  ASSERT_EQ(outcome.metrics.size(), 4u);
  for (std::size_t i = 0; i < 4; ++i) {
    const auto& line = outcome.metrics[i];
    EXPECT_EQ(line.at("step"), i + 1);
    for (const char* key : {"loss", "grad_norm", "lr", "tokens_per_second", "memory_bytes", "skipped"}) {
      EXPECT_TRUE(line.at(key).is_number()) << key << " in " << line;
    }
    EXPECT_EQ(line.contains("eval_loss"), i % 2 == 1) << line;
  }
  EXPECT_EQ(outcome.report.steps, 4);
  EXPECT_EQ(outcome.report.loss_first, outcome.losses().front());
  EXPECT_EQ(outcome.report.loss_last, outcome.losses().back());
  EXPECT_GT(outcome.report.peak_memory_bytes, 0);
  EXPECT_GT(outcome.report.predicted_memory_bytes, 0);
  ASSERT_TRUE(outcome.report.entropy_floor.has_value());
  EXPECT_TRUE(fs::exists(outcome.folder / "config.toml"));
  EXPECT_TRUE(fs::exists(outcome.folder / "report.json"));
}

TEST_F(Loop, TheMemoryIsWhatWasPredicted) {
  // Large enough that what does not grow with the model is small beside it. One rank: the meter counts the whole process.
  for (const auto& [model, size] : std::map<std::string, std::vector<std::string>>{
           {"llama", {"model.dim=64", "model.ffn=192", "model.vocab=512", "data.sequence=64"}},
           {"gpt2", {"model.dim=64", "model.vocab=512", "data.sequence=64"}},
           {"mlp", {"model.dim=256", "train.batch=256"}},
           {"vgg", {"model.image=32", "model.convolutions=[16, 0, 32, 0]", "model.pool=8", "model.ffn=256"}}}) {
    for (const char* precision : {"fp32", "bf16"}) {
      auto overrides = size;
      overrides.push_back(std::string("train.precision=") + precision);
      const auto report = run(model, 1, overrides).report;
      const auto predicted = static_cast<double>(report.predicted_memory_bytes);
      // In bf16 the matrix library of the CPU has memory of its own.
      const double part = std::string(precision) == "fp32" ? 0.02 : 0.1;
      EXPECT_NEAR(predicted, static_cast<double>(report.peak_memory_bytes), part * predicted)
          << model << " in " << precision;
    }
  }
}

TEST_F(Loop, WhatIsKeptForBackwardCostsWhatWasPredictedAndChangesNoLoss) {
  for (const char* model : {"llama", "gpt2", "mlp"}) {
    std::vector<std::string> size = {"model.dim=64", "model.vocab=512", "data.sequence=64"};
    if (model == std::string("mlp")) size = {"model.dim=256", "train.batch=256"};
    const auto least = run(model, 1, size);
    auto held = static_cast<double>(least.report.peak_memory_bytes);
    for (const char* kept : {"activations", "all"}) {
      auto overrides = size;
      overrides.push_back(std::string("train.keep_for_backward=") + kept);
      const auto outcome = run(model, 1, overrides);
      const auto predicted = static_cast<double>(outcome.report.predicted_memory_bytes),
                 measured = static_cast<double>(outcome.report.peak_memory_bytes);
      EXPECT_NEAR(predicted, measured, 0.02 * predicted) << model << ", " << kept;
      if (model != std::string("mlp")) EXPECT_GT(measured, held) << model << ", " << kept;
      held = measured;
      ASSERT_EQ(outcome.losses().size(), least.losses().size());
      for (std::size_t i = 0; i < least.losses().size(); ++i)
        EXPECT_NEAR(outcome.losses()[i], least.losses()[i], 1e-5 * least.losses()[i]) << model << ", " << kept;
    }
  }
}

TEST_F(Loop, EvaluationDoesNotDependOnTheLayoutNorDisturbTraining) {
  const std::vector<std::string> often = {"train.eval_every=1", "train.eval_batches=3"};
  const auto one = run("gpt2", 1, often), three = run("gpt2", 3, often), none = run("gpt2", 1);
  EXPECT_EQ(one.losses(), none.losses());
  for (std::size_t i = 0; i < 4; ++i) {
    const double expected = one.metrics[i].at("eval_loss");
    EXPECT_NEAR(three.metrics[i].at("eval_loss").get<double>(), expected, 1e-5 * expected);
    EXPECT_NE(expected, one.losses()[i]) << "held-out data are not the training data";
  }
}

TEST_F(Loop, LowerPrecisionsTrainOnTheCpu) {
  const auto expected = run("llama", 2).losses();
  for (const char* precision : {"bf16", "fp16", "fp8"}) {
    const auto outcome = run("llama", 2, {std::string("train.precision=") + precision});
    ASSERT_EQ(outcome.metrics.size(), 4u) << outcome.error;
    for (std::size_t i = 0; i < 4; ++i) EXPECT_NEAR(outcome.losses()[i], expected[i], 0.02 * expected[i]) << precision;
    EXPECT_EQ(outcome.report.skipped, 0) << precision;
  }
}

TEST_F(Loop, StepsThatTheScalerSkipsAreCounted) {
  // The first scale is so large that gradients overflow until it has been halved a few times.
  const auto outcome = run("llama", 2, {"train.precision=fp16", "optimizer.loss_scale=1e9", "train.steps=30"});
  EXPECT_GT(outcome.report.skipped, 0) << outcome.error;
  EXPECT_LT(outcome.report.skipped, 30);
  EXPECT_EQ(outcome.metrics.back().at("skipped"), outcome.report.skipped);
  EXPECT_LT(outcome.losses().back(), outcome.losses().front());
}

TEST_F(Loop, ANanOnOneRankEndsTheRunOnAll) {
  const auto outcome = run("llama", 3, {"fault.nan_step=2", "fault.nan_rank=1"});
  EXPECT_NE(outcome.error.find("step 2: the loss is nan, from rank 1"), std::string::npos) << outcome.error;
  EXPECT_NE(outcome.error.find("train.nan_policy = stop"), std::string::npos) << outcome.error;
  ASSERT_EQ(outcome.metrics.size(), 2u);
  EXPECT_TRUE(outcome.metrics.back().at("loss").is_null());
}

// Whose loss it was is asked once, of all ranks together: nothing is gathered at one of them.
TEST_F(Loop, ANanIsSearchedForByOneAllReduce) {
  const std::vector<std::string> traced = {"train.trace_from=2", "train.trace_steps=2", "train.nan_policy=skip"};
  auto faulty = traced;
  faulty.insert(faulty.end(), {"fault.nan_step=2", "fault.nan_rank=1"});
  const auto usual = traced_collectives(run("llama", 3, traced).folder);
  const auto searched = traced_collectives(run("llama", 3, faulty).folder);
  std::vector<std::string> more, fewer;
  std::set_difference(searched.begin(), searched.end(), usual.begin(), usual.end(), std::back_inserter(more));
  std::set_difference(usual.begin(), usual.end(), searched.begin(), searched.end(), std::back_inserter(fewer));
  EXPECT_EQ(more, std::vector<std::string>{"all_reduce world 24"}) << "a number of each rank";
  EXPECT_TRUE(fewer.empty()) << fewer.front();
}

TEST_F(Loop, GradientsThatAreNotFiniteEndTheRunToo) {
  // The first update makes weights so large that a norm overflows on the way back, while the loss is still a number.
  const auto outcome = run("llama", 2, {"optimizer.type=sgd", "optimizer.lr=1e30", "train.clip=0"});
  EXPECT_NE(outcome.error.find("step 2: the gradients are not finite"), std::string::npos) << outcome.error;
}

TEST_F(Loop, OrTheStepIsSkippedOnAll) {
  const auto outcome = run("llama", 3, {"fault.nan_step=2", "fault.nan_rank=1", "train.nan_policy=skip"});
  EXPECT_EQ(outcome.error, "");
  ASSERT_EQ(outcome.metrics.size(), 4u);
  EXPECT_EQ(outcome.metrics[0].at("skipped"), 0);
  EXPECT_EQ(outcome.metrics[1].at("skipped"), 1);
  EXPECT_EQ(outcome.report.skipped, 1);
  EXPECT_TRUE(std::isfinite(outcome.report.loss_last));
}

TEST_F(Loop, TheTraceShowsComputeAndCommunicationOfEveryRank) {
  const auto outcome = run("llama", 2, {"train.trace_from=2", "train.trace_steps=2"});
  const auto trace = nlohmann::json::parse(std::ifstream(outcome.folder / "trace.json"));
  std::map<int, std::set<std::string>> seen;
  for (const auto& event : trace.at("traceEvents")) {
    if (event.at("ph") == "X") seen[event.at("pid")].insert(event.at("name"));
  }
  ASSERT_EQ(seen.size(), 2u);
  for (const auto& [rank, names] : seen) {
    for (const char* name : {"data", "forward", "backward", "optimizer", "all_reduce"}) {
      EXPECT_TRUE(names.contains(name)) << name << " of rank " << rank;
    }
  }
}

// The list that plan computes from the configuration alone is what a traced step of the real loop did.
TEST_F(Loop, AStepHasExactlyTheCollectivesOfThePlan) {
  for (const char* compression : {"none", "bf16", "powersgd"}) {
    const std::vector<std::string> overrides = {
        "train.trace_from=3",    "train.trace_steps=1", "layout.first_bucket_mb=0.001",
        "layout.bucket_mb=0.01", "train.microbatch=6",  std::string("layout.compression=") + compression};
    const auto outcome = run("gpt2", 2, overrides);
    Config config = parse_config(models.at("gpt2") + common, "a.toml", overrides);
    resolve(config, 2);
    const auto expected = planned_collectives(plan::describe(config.model.spec), data_parallel_of(config));
    EXPECT_GT(expected.size(), 3u);
    EXPECT_EQ(traced_collectives(outcome.folder), expected) << compression;
  }
}

TEST_F(Loop, CompressionsAndOptimizersTrain) {
  for (const char* compression : {"bf16", "fp16", "powersgd"}) {
    const auto outcome = run("llama", 2, {std::string("layout.compression=") + compression});
    ASSERT_EQ(outcome.metrics.size(), 4u) << outcome.error;
    EXPECT_LT(outcome.losses().back(), outcome.losses().front()) << compression;
  }
  for (const char* type : {"adam", "sgd"}) {
    const auto outcome = run("llama", 2, {std::string("optimizer.type=") + type, "train.steps=20", "optimizer.lr=0.02"});
    EXPECT_LT(outcome.losses().back(), outcome.losses().front()) << type;
  }
}

}  // namespace
}  // namespace bonfire::loop_test
