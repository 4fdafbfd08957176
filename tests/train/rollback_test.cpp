// train.nan_policy = "rollback": what was not finite is undone, on all ranks.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "bonfire/checkpoint/compare.h"
#include "tests/support/thrown.h"
#include "tests/train/loop_fixture.h"

namespace bonfire::rollback_test {
namespace {

using testing::expect_part;
using testing::Loop;
using testing::Outcome;
using Overrides = std::vector<std::string>;

class Rollback : public Loop {
 protected:
  Outcome run_with(const char* model, int ranks, const Overrides& layout, const Overrides& fault) {
    Overrides all{"train.nan_policy=rollback", "train.steps=8", "optimizer.decay=constant"};
    all.insert(all.end(), layout.begin(), layout.end());
    all.insert(all.end(), fault.begin(), fault.end());
    return run(model, ranks, all);
  }
};

// Once is what a bit that flipped looks like.
TEST_F(Rollback, ARunThatGoesBackComesToWhereItWouldHaveComeWithout) {
  struct Case {
    const char* model;
    int ranks;
    Overrides layout;
  };
  const Case cases[] = {{"llama", 1, {}},
                        {"gpt2", 3, {}},
                        {"llama", 2, {"layout.shard=2", "checkpoint.asynchronous=false"}},
                        {"mlp", 2, {"train.precision=fp16", "optimizer.loss_scale=256"}},
                        {"gpt2", 2, {"layout.pipeline=2", "train.microbatch=12"}}};
  for (const auto& each : cases) {
    Overrides saves = each.layout;
    saves.insert(saves.end(), {"checkpoint.every=2", "checkpoint.keep=0"});
    const auto whole = run_with(each.model, each.ranks, saves, {});
    const auto last = std::to_string(each.ranks - 1);
    const auto back =
        run_with(each.model, each.ranks, saves, {"fault.nan_step=6", "fault.nan_rank=" + last, "fault.nan_times=1"});
    ASSERT_EQ(back.error, "") << each.model;
    ASSERT_EQ(back.metrics.size(), whole.metrics.size());  // each step once
    for (std::size_t at = 0; at < whole.metrics.size(); ++at)
      for (const char* name : {"step", "loss", "grad_norm", "lr", "skipped"})
        EXPECT_EQ(back.metrics[at].at(name), whole.metrics[at].at(name)) << each.model << ", " << name << ", " << at;
    EXPECT_TRUE(compare_checkpoints(whole.report.checkpoint, back.report.checkpoint).empty()) << each.model;
  }
}

// Where nothing has come due, there is what the run has begun with.
TEST_F(Rollback, BeforeTheFirstSaveTheRunBeginsAnew) {
  const Overrides never{"checkpoint.every=100", "train.clip=0"};
  const auto whole = run_with("llama", 2, never, {}),
             back = run_with("llama", 2, never, {"fault.nan_step=3", "fault.nan_times=1"});
  ASSERT_EQ(back.error, "");
  EXPECT_EQ(back.losses(), whole.losses());
  EXPECT_TRUE(compare_checkpoints(whole.report.checkpoint, back.report.checkpoint).empty());
}

TEST_F(Rollback, ARunThatComesNoFurtherEnds) {
  const auto outcome = run_with("llama", 2, {"checkpoint.every=2"}, {"fault.nan_step=5", "fault.nan_rank=1"});
  expect_part(outcome.error, "step 5: not finite again, after the run had gone back because of step 5");
  expect_part(outcome.error, "train.nan_policy = rollback");
  // What was saved before is still there.
  EXPECT_TRUE(std::filesystem::exists(outcome.folder / "checkpoints" / "step-00000004" / "manifest.json"));
}

TEST(RollbackPolicy, NeedsCheckpoints) {
  const auto words = testing::thrown<ConfigError>([] {
    Config config = parse_config(testing::models.at("mlp") + testing::common, "a.toml",
                                 {"train.nan_policy=rollback", "checkpoint.every=0"});
    resolve(config, 1);
  });
  expect_part(words, "train.nan_policy = \"rollback\"");
  expect_part(words, "checkpoint.every = 0");
}

}  // namespace
}  // namespace bonfire::rollback_test
