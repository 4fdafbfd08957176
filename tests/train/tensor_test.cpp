// The real loop with layers that ranks split, against one rank.
#include <gtest/gtest.h>

#include <cmath>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tests/support/thrown.h"
#include "tests/train/loop_fixture.h"
#include "tests/train/step_collectives.h"

namespace bonfire::tensor_test {
namespace {

using testing::common;
using testing::Loop;
using testing::models;

using Overrides = std::vector<std::string>;

Overrides operator+(Overrides one, const Overrides& other) {
  one.insert(one.end(), other.begin(), other.end());
  return one;
}

class Tensor : public Loop {
 protected:
  void expect_like_one_rank(const std::string& model, int ranks, const Overrides& layout, const Overrides& both = {}) {
    Loop::expect_like_one_rank(model, ranks, layout, both + Overrides{"model.heads=4"});
  }
  void expect_collectives_of_plan(const std::string& model, int ranks, const Overrides& layout) {
    SCOPED_TRACE(fmt::format("{} {}", model, fmt::join(layout, " ")));
    const auto outcome = run(model, ranks, layout + testing::traced_step + Overrides{"model.heads=4"});
    ASSERT_EQ(outcome.error, "");
    testing::expect_collectives_of_plan(outcome.folder, ranks);
  }
};

TEST_F(Tensor, RanksHaveTheCurveOfOne) {
  for (const char* model : {"llama", "gpt2"}) {
    SCOPED_TRACE(model);
    expect_like_one_rank(model, 2, {"layout.tensor=2"});
    expect_like_one_rank(model, 4, {"layout.tensor=4", "layout.sequence_parallel=false", "train.microbatch=12"});
  }
  expect_like_one_rank("llama", 4, {"layout.tensor=2", "layout.shard=2", "train.microbatch=6"},
                       {"train.keep_for_backward=all"});
  expect_like_one_rank("gpt2", 4, {"layout.tensor=2", "layout.replicate=2", "layout.tensor_chunks=4"},
                       {"model.dropout=0.1"});
}

TEST_F(Tensor, PipelinesAndShardsOnEightRanks) {
  for (const char* schedule : {"1f1b", "zb-h1"})
    expect_like_one_rank("llama", 8,
                         {"layout.pipeline=2", "layout.shard=2", "layout.tensor=2", "train.microbatch=6",
                          "layout.tensor_chunks=3", std::string("layout.schedule=") + schedule});
  expect_like_one_rank("gpt2", 8,
                       {"layout.pipeline=2", "layout.shard=2", "layout.tensor=2", "train.microbatch=6",
                        "layout.sequence_parallel=false", "layout.sharded=optimizer"});
}

// Law 2 through the configuration.
TEST_F(Tensor, StepsHaveExactlyTheCollectivesOfThePlan) {
  for (const char* model : {"llama", "gpt2"})
    for (const Overrides& layout :
         {Overrides{"layout.tensor=2", "layout.replicate=2", "train.microbatch=12"},
          {"layout.tensor=2", "layout.shard=2", "train.microbatch=12"},
          {"layout.tensor=2", "layout.shard=2", "layout.sequence_parallel=false", "layout.sharded=gradients"},
          {"layout.tensor=2", "layout.shard=2", "layout.wrap=all"},
          {"layout.tensor=2", "layout.shard=2", "layout.tensor_chunks=2", "train.microbatch=1"},
          {"layout.tensor=2", "layout.shard=2", "layout.tensor_chunks=5", "layout.sequence_parallel=false"},
          {"layout.tensor=2", "layout.replicate=2", "layout.tensor_chunks=5", "train.microbatch=12"},
          {"layout.tensor=4", "layout.sequence_parallel=false", "train.microbatch=24", "model.vocab=41"}})
      expect_collectives_of_plan(model, 4, layout);
}

TEST_F(Tensor, PipelinesHaveExactlyTheCollectivesOfThePlan) {
  const Overrides mesh{"layout.pipeline=2", "layout.shard=2", "layout.tensor=2", "train.microbatch=6"};
  for (const char* model : {"llama", "gpt2"})
    for (const Overrides& layout : {Overrides{"layout.schedule=1f1b", "layout.tensor_chunks=3"},
                                    {"layout.schedule=zb-h1"},
                                    {"layout.schedule=zb-h1", "layout.sequence_parallel=false", "layout.tensor_chunks=3"},
                                    {"layout.schedule=interleaved", "layout.sequence_parallel=false"},
                                    {"layout.sharded=gradients", "train.precision=bf16", "model.vocab=41"}})
      expect_collectives_of_plan(model, 8, mesh + layout);
  expect_collectives_of_plan("llama", 8, mesh + Overrides{"layout.reshard_after_forward=true", "layout.recompute=full"});
}

TEST_F(Tensor, ALossThatIsNotFiniteEndsTheRunOnAllRanks) {
  const auto stopped = run("llama", 4, {"layout.tensor=2", "layout.replicate=2", "fault.nan_step=2", "fault.nan_rank=3"});
  testing::expect_part(stopped.error, "step 2: the loss is nan, from rank 2, 3");
}

TEST(TensorKeys, ThatCannotBeAreRefused) {
  const auto refused = [](const std::string& model, int ranks, const Overrides& overrides, const std::string& words) {
    testing::expect_part(testing::thrown<ConfigError>([&] {
                           Config config = parse_config(models.at(model) + common, "a.toml", overrides);
                           resolve(config, ranks);
                         }),
                         words);
  };
  refused("gpt2", 4, {"layout.tensor=4"}, "layout.tensor = 4: model.heads is 2, which 4 ranks do not divide");
  refused("llama", 4, {"layout.tensor=4"},
          "layout.tensor = 4: does not divide data.sequence = 6, which layout.sequence_parallel does; allowed: a divisor of "
          "it, or layout.sequence_parallel = false");
  refused("llama", 2, {"layout.tensor_chunks=2"}, "layout.tensor_chunks = 2: no layer is split with layout.tensor = 1");
  refused("vgg", 2, {"layout.tensor=2"}, "layout.tensor = 2: model.type is \"vgg\"");
  refused("mlp", 2, {"layout.tensor=2"}, "layout.tensor = 2: model.type is \"mlp\"");
  refused("llama", 2, {"layout.tensor=2", "train.precision=fp8"}, "train.precision = \"fp8\": layout.tensor = 2");
  refused("llama", 2, {"layout.tensor=2", "layout.compression=powersgd"}, "PowerSGD needs whole matrices");
  refused("llama", 4, {"layout.tensor=2", "layout.pipeline=2", "layout.stages=measured"}, "layout.stages = \"measured\"");
  refused("llama", 2, {"layout.tensor=2", "model.reversible=true"},
          "layout.tensor = 2: model.reversible is true: 2 ranks do not split such blocks");
}

}  // namespace
}  // namespace bonfire::tensor_test
