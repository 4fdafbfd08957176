// The real loop with PipeDream's schedules: what a step is, what is frozen, and where a run can go on.
#include <gtest/gtest.h>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "bonfire/train/config.h"
#include "bonfire/train/resume.h"
#include "tests/support/thrown.h"
#include "tests/train/loop_fixture.h"

namespace bonfire::pipedream_test {
namespace {

using testing::common;
using testing::Loop;
using testing::models;
using testing::Outcome;

using Overrides = std::vector<std::string>;

Overrides operator+(Overrides a, const Overrides& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

class PipeDreamRuns : public Loop {
 protected:
  void expect_equal(const Outcome& outcome, const Outcome& expected) {
    ASSERT_EQ(outcome.error, "");
    ASSERT_EQ(outcome.metrics.size(), expected.metrics.size());
    for (std::size_t step = 0; step < expected.metrics.size(); ++step)
      for (const auto* key : {"loss", "grad_norm"}) {
        const auto value = expected.metrics[step].at(key).get<double>();
        EXPECT_NEAR(outcome.metrics[step].at(key).get<double>(), value, 1e-5 * std::abs(value))
            << key << ", step " << step + 1;
      }
  }
};

const Overrides untied{"model.tied=false"};
const std::vector<std::string> schedules = {"pipedream", "pipedream-vertical", "pipedream-2bw", "pipedream-flush"};

Overrides staged(const std::string& schedule, int stages) {
  return untied + Overrides{"train.microbatch=6", fmt::format("layout.pipeline={}", stages), "layout.schedule=" + schedule};
}

// Of lines of metrics: the most of each stage.
std::vector<int> stalest(const Outcome& outcome) {
  std::vector<int> most;
  for (const auto& line : outcome.metrics) {
    const auto stages = line.at("staleness_by_stage").get<std::vector<int>>();
    EXPECT_EQ(line.at("staleness"), *std::max_element(stages.begin(), stages.end()));
    most.resize(stages.size());
    for (std::size_t stage = 0; stage < stages.size(); ++stage) most[stage] = std::max(most[stage], stages[stage]);
  }
  return most;
}

// A stage without anything to train is as good as new for ever; the others are what they were.
TEST_F(PipeDreamRuns, AStageMayTrainNothing) {
  struct Case {
    Overrides freeze;
    int stages;
    std::vector<int> frozen;
  };
  for (const auto& [freeze, stages, frozen] : {Case{{"train.freeze=[\"embedding\", \"blocks.0\"]"}, 2, {0}},
                                               Case{{"train.freeze=[\"blocks.0\"]", "layout.stages=[1, 1, 2]"}, 3, {1}},
                                               // The first stage has the embedding alone, which has no adapter.
                                               Case{{"adapter.rank=2", "layout.stages=[1, 3]"}, 2, {0}}})
    for (const auto& schedule : schedules) {
      SCOPED_TRACE(fmt::format("{}, {}", schedule, freeze.front()));
      const auto outcome =
          run("llama", stages,
              staged(schedule, stages) + freeze + Overrides{"train.steps=8", "train.clip=0", "checkpoint.every=0"});
      ASSERT_EQ(outcome.error, "");
      const auto stale = stalest(outcome);
      for (int stage = 0; stage < stages; ++stage) {
        const bool trains = std::find(frozen.begin(), frozen.end(), stage) == frozen.end();
        const int full = schedule == "pipedream"            ? stages - 1 - stage
                         : schedule == "pipedream-vertical" ? stages - 1
                         : schedule == "pipedream-2bw"      ? 1
                                                            : 0;
        EXPECT_EQ(stale[static_cast<std::size_t>(stage)], trains ? full : 0) << "stage " << stage;
      }
      EXPECT_EQ(outcome.report.staleness, stale);
      if (schedule != "pipedream-flush") continue;
      Overrides alone = untied + Overrides{freeze.front(), "train.steps=8", "train.clip=0", "checkpoint.every=0"};
      expect_equal(outcome, run("llama", 1, alone));
    }
}

// docs/pipedream.md, "What a step is": an update averages the minibatches of a round, with the learning rate of the last
// one, and clips that average. Two replicas of the whole model with half of a batch each are one rank with the whole.
TEST_F(PipeDreamRuns, ARoundOfReplicasIsOneUpdate) {
  const Overrides both =
      untied + Overrides{"optimizer.type=sgd", "optimizer.lr=0.5", "optimizer.decay=constant", "checkpoint.every=0"};
  for (const auto* clip : {"train.clip=0", "train.clip=0.05"})
    for (const auto* schedule : {"pipedream", "pipedream-vertical"}) {
      SCOPED_TRACE(fmt::format("{}, {}", schedule, clip));
      const auto one = run("llama", 1, both + Overrides{clip, "train.batch=8", "train.steps=6", "optimizer.warmup=4"});
      const auto two =
          run("llama", 2,
              both + Overrides{clip, "train.batch=4", "train.steps=12", "optimizer.warmup=8", "layout.pipeline=1",
                               "layout.replicas=[2]", std::string("layout.schedule=") + schedule});
      ASSERT_EQ(two.error, "");
      ASSERT_EQ(one.metrics.size(), 6u);
      ASSERT_EQ(two.metrics.size(), 12u);
      for (std::size_t update = 0; update < 6; ++update) {
        SCOPED_TRACE(update);
        const auto &first = two.metrics[2 * update], &second = two.metrics[2 * update + 1];
        const auto near = [&](double value, const char* key) {
          const auto expected = one.metrics[update].at(key).get<double>();
          EXPECT_NEAR(value, expected, 1e-5 * std::abs(expected)) << key;
        };
        near((first.at("loss").get<double>() + second.at("loss").get<double>()) / 2, "loss");
        near(first.at("grad_norm").get<double>(), "grad_norm");
        near(second.at("grad_norm").get<double>(), "grad_norm");
        near(second.at("lr").get<double>(), "lr");
        EXPECT_EQ(first.at("staleness"), 0);
      }
    }
}

// Every stage clips its own gradient: the norm of a line is that of all of them, before.
TEST_F(PipeDreamRuns, StagesClipForThemselves) {
  const Overrides keys =
      staged("pipedream-flush", 2) + Overrides{"optimizer.type=sgd", "optimizer.lr=0.5", "optimizer.decay=constant"};
  const auto free = run("llama", 2, keys + Overrides{"train.clip=0"});
  const auto clipped = run("llama", 2, keys + Overrides{"train.clip=0.05"});
  ASSERT_EQ(free.error + clipped.error, "");
  EXPECT_EQ(clipped.metrics[0].at("grad_norm"), free.metrics[0].at("grad_norm"));
  EXPECT_NE(clipped.metrics[1].at("loss"), free.metrics[1].at("loss"));
}

TEST_F(PipeDreamRuns, WhatElseAModelHasGoesWithIt) {
  struct Case {
    const char* model;
    Overrides keys;
  };
  for (const auto& [model, keys] : {Case{"gpt2", {"model.dropout=0.2"}}, Case{"llama", {"adapter.rank=2"}},
                                    Case{"gpt2", {"adapter.rank=2", "adapter.dropout=0.2"}},
                                    Case{"llama", {"model.reversible=true"}}, Case{"mlp", {}}, Case{"vgg", {}}}) {
    SCOPED_TRACE(fmt::format("{} {}", model, keys.empty() ? "" : keys.front()));
    // The same microbatches in the same order, however many ranks there are.
    Overrides plain = keys + Overrides{"train.microbatch=12", "train.clip=0", "checkpoint.every=0"};
    if (std::string(model) == "llama" || std::string(model) == "gpt2") plain = plain + untied;
    const auto one = run(model, 1, plain);
    ASSERT_EQ(one.error, "");
    const Overrides layout{"layout.pipeline=2", "layout.replicas=[2, 1]"};
    expect_equal(run(model, 3, plain + layout + Overrides{"layout.schedule=pipedream-flush"}), one);
    for (const std::string schedule : {"pipedream-vertical", "pipedream-2bw"}) {
      const auto outcome = run(model, 3, plain + layout + Overrides{"layout.schedule=" + schedule});
      EXPECT_EQ(outcome.error, "") << schedule;
      // What drops elements drops the same ones when it is made again.
      if (keys.empty() || keys.front() == "model.reversible=true") continue;
      const auto again = run(model, 3, plain + layout + Overrides{"layout.schedule=" + schedule, "layout.recompute=full"});
      ASSERT_EQ(again.error, "") << schedule;
      EXPECT_EQ(again.losses(), outcome.losses()) << schedule;
    }
  }
}

TEST_F(PipeDreamRuns, InBf16TheModesLearnAlike) {
  for (const auto& schedule : schedules) {
    const auto whole =
        run("llama", 2, staged(schedule, 2) + Overrides{"train.steps=8", "train.clip=0", "checkpoint.every=0"});
    const auto half = run("llama", 2, staged(schedule, 2) + Overrides{"train.steps=8", "train.precision=bf16"});
    ASSERT_EQ(whole.error + half.error, "") << schedule;
    EXPECT_NE(half.losses(), whole.losses());
    for (std::size_t step = 0; step < 8; ++step)
      EXPECT_NEAR(half.losses()[step], whole.losses()[step], 0.02 * whole.losses()[step]) << schedule << ", step " << step;
    EXPECT_EQ(half.report.staleness, whole.report.staleness);
  }
}

Config resolved(const Overrides& overrides, std::int64_t ranks) {
  Config config = parse_config(models.at("llama"), "a.toml", untied + overrides);
  resolve(config, ranks);
  return config;
}

TEST(PipeDreamKeys, DefaultsAreWholeRounds) {
  const Overrides keys{"layout.pipeline=2", "layout.replicas=[3, 1]", "train.batch=4"};
  auto config = resolved(keys + Overrides{"layout.schedule=pipedream"}, 4);
  EXPECT_EQ(config.train.steps, 201);
  EXPECT_EQ(config.checkpoint.every, 102);
  // Nobody asked for others.
  config = resolved(keys + Overrides{"layout.schedule=pipedream-flush", "train.batch=12", "train.microbatch=2"}, 4);
  EXPECT_EQ(config.train.steps, 200);
  EXPECT_EQ(config.checkpoint.every, 100);
  EXPECT_NE(testing::thrown<ConfigError>([&] {
              resolved(keys + Overrides{"layout.schedule=pipedream", "checkpoint.every=100"}, 4);
            }).find("checkpoint.every = 100: all stages must have had the same minibatches there"),
            std::string::npos);
}

TEST(PipeDreamKeys, WhatCannotBeIsOneLine) {
  const auto refused = [&](const Overrides& keys, std::int64_t ranks, const char* words) {
    const auto said = testing::thrown<ConfigError>([&] { resolved(keys, ranks); });
    EXPECT_NE(said.find(words), std::string::npos) << said;
    EXPECT_EQ(said.find('\n'), std::string::npos) << said;
  };
  refused({"layout.server=1", "layout.schedule=pipedream"}, 2, "layout.schedule = \"pipedream\": beside a parameter server");
  refused({"layout.pipeline=2", "layout.replicas=[3, 1]", "layout.schedule=pipedream"}, 3,
          "layout.replicas = [3, 1]: 4 ranks in all, but there are 3");
  refused({"layout.pipeline=2", "layout.schedule=pipedream", "layout.stash=false", "layout.recompute=full"}, 2,
          "layout.recompute = \"full\" makes activations again in backward");
  refused({"layout.pipeline=2", "layout.schedule=pipedream", "layout.stash=false", "model.reversible=true"}, 2,
          "model.reversible = true makes activations again in backward");
  refused({"layout.pipeline=3", "layout.replicas=[997, 991, 983]", "layout.schedule=pipedream"}, 2971, "come together only");
  refused({"layout.pipeline=2", "layout.schedule=pipedream", "train.steps=2000000000", "checkpoint.every=0"}, 2,
          "runs for 2000000000 minibatches without running empty");
}

// A run that ended, or was cut, where the replicas of another layout are in the middle of a round: the pipeline could never
// run empty again.
TEST_F(PipeDreamRuns, GoesOnOnlyFromWholeRounds) {
  const auto before = run("llama", 1, untied + Overrides{"train.batch=4", "train.steps=5", "checkpoint.every=5"});
  ASSERT_EQ(before.error, "");
  const auto checkpoint = checkpoints_of(before.folder) / "step-00000005";
  const Overrides keys{"train.batch=4", "train.steps=12", "checkpoint.every=6", "layout.pipeline=2",
                       "layout.schedule=pipedream"};
  const auto whole = resolved(keys, 2);
  require_resumable(whole, Resume{.checkpoint = checkpoint}, LookAt::files);
  const auto odd = resolved(keys + Overrides{"layout.replicas=[2, 1]"}, 3);
  const auto said =
      testing::thrown<ConfigError>([&] { require_resumable(odd, Resume{.checkpoint = checkpoint}, LookAt::files); });
  EXPECT_NE(said.find("have whole rounds after 2 minibatches, and the checkpoint in"), std::string::npos) << said;
  EXPECT_NE(said.find("is of step 5"), std::string::npos) << said;
  // Whoever comes by another way is told as well.
  std::string error;
  testing::run_ranks(3, [&](World& world) {
    try {
      train(world, odd, {.folder = parent_ / "odd", .begin_with = checkpoint});
    } catch (const Error& caught) {
      if (world.rank() == 0) error = caught.what();
    }
  });
  EXPECT_NE(error.find("is of step 5"), std::string::npos) << error;
}

}  // namespace
}  // namespace bonfire::pipedream_test
