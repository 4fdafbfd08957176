// Law 1 for pipelines: whatever the schedule, the stages and the data-parallel ranks, training is that of one rank.
#include <string>

#include <gtest/gtest.h>

#include <fmt/format.h>

#include "bonfire/schedule/generate.h"
#include "bonfire/schedule/text.h"
#include "tests/support/pipeline_training.h"
#include "tests/support/ranks.h"
#include "tests/support/tiny_training.h"

namespace bonfire::parity_test {
namespace {

using testing::PipelineRun;
using testing::run_ranks;
using testing::tiny_models;

plan::ModelSpec model(const std::string& name, std::int64_t layers) {
  for (const auto& [other, spec] : tiny_models())
    if (other == name) {
      auto deeper = spec;
      deeper.layers = layers;
      return deeper;
    }
  ADD_FAILURE() << "no model " << name;
  return {};
}

// Chunks for which the schedule exists.
std::vector<int> chunks_of(const std::string& name) {
  if (name == "zb-v") return {2};
  if (name == "naive" || name == "gpipe" || name == "interleaved") return {1, 2};
  return {1};
}

class PipelineParity : public ::testing::TestWithParam<int> {};

// Tied weights are on the first and the last stage; skip_test.cpp has all numbers of microbatches. Microbatches whose number
// does not divide the samples differ in size.
TEST_P(PipelineParity, EverySchedule) {
  const PipelineRun alone{.spec = model("gpt2", 6), .steps = 2};
  const auto plain = testing::train_plainly(alone);
  run_ranks(GetParam(), [&](World& world) {
    for (const auto& name : schedule::schedule_names())
      for (const int chunks : chunks_of(name))
        for (const int microbatches : {1, 4, 7, 16}) {
          if (name == "interleaved" && microbatches % world.size() != 0) continue;
          auto run = alone;
          run.shape = {.pipeline = world.size()};
          run.schedule = name;
          run.chunks = chunks;
          run.microbatches = microbatches;
          SCOPED_TRACE(fmt::format("{}, {} ranks, {} chunks, {} microbatches", name, world.size(), chunks, microbatches));
          testing::expect_parity(testing::train_pipeline(world, run), plain);
        }
  });
}

TEST_P(PipelineParity, EveryModel) {
  for (const auto& [name, spec] : tiny_models()) {
    if (spec.type == plan::ModelType::vgg && GetParam() > 2) continue;
    PipelineRun run{.spec = spec, .shape = {.pipeline = GetParam()}};
    if (spec.type != plan::ModelType::vgg) run.spec.layers = 4;
    const auto plain = testing::train_plainly(run);
    run_ranks(GetParam(), [&](World& world) {
      for (const auto* schedule : {"1f1b", "zb-h1"}) {
        auto with = run;
        with.schedule = schedule;
        SCOPED_TRACE(fmt::format("{}, {}", name, schedule));
        testing::expect_parity(testing::train_pipeline(world, with), plain);
      }
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, PipelineParity, ::testing::Values(2, 4),
                         [](const auto& info) { return "ranks" + std::to_string(info.param); });

struct Composition {
  MeshShape shape;
  std::vector<Sharded> whats;
};

class PipelineComposition : public ::testing::TestWithParam<Composition> {};

// Clipping is by the norm over all stages and shares; weights stay tied over stages that are sharded.
TEST_P(PipelineComposition, Parity) {
  const auto& [shape, whats] = GetParam();
  PipelineRun run{.spec = model("gpt2", 6), .shape = shape, .clip = 0.5};
  const auto plain = testing::train_plainly(run);
  run_ranks(shape.size(), [&](World& world) {
    for (const auto what : whats)
      for (const auto* schedule : {"1f1b", "interleaved", "zb-v"}) {
        auto with = run;
        with.shard.what = what;
        with.schedule = schedule;
        with.chunks = schedule::natural_chunks(schedule);
        SCOPED_TRACE(fmt::format("{}, {} sharded", schedule, plan::name_of(what)));
        testing::expect_parity(testing::train_pipeline(world, with), plain);
      }
  });
}

const std::vector<Sharded> zero{Sharded::optimizer, Sharded::gradients, Sharded::parameters};
INSTANTIATE_TEST_SUITE_P(Layouts, PipelineComposition,
                         ::testing::Values(Composition{{.pipeline = 2, .shard = 2}, zero},
                                           Composition{{.pipeline = 2, .replicate = 2}, {Sharded::none}},
                                           Composition{{.pipeline = 4, .shard = 2}, zero},
                                           Composition{{.pipeline = 2, .replicate = 2, .shard = 2}, zero}),
                         [](const auto& info) {
                           const auto& shape = info.param.shape;
                           return fmt::format("pp{}_replicate{}_shard{}", shape.pipeline, shape.replicate, shape.shard);
                         });

TEST(Pipeline, MixedPrecisionFollowsFp32) {
  PipelineRun run{.spec = model("llama", 4), .shape = {.pipeline = 2, .shard = 2}, .steps = 3, .dtype = at::kFloat};
  run.shard.what = Sharded::parameters;
  const auto plain = testing::train_plainly(run);
  run_ranks(4, [&](World& world) {
    for (const auto type : {at::kBFloat16, at::kHalf})
      for (const auto* schedule : {"1f1b", "zb-h1"}) {
        auto with = run;
        with.compute = type;
        with.scaled = type == at::kHalf;
        with.schedule = schedule;
        const auto outcome = testing::train_pipeline(world, with);
        for (std::size_t step = 0; step < plain.losses.size(); ++step)
          EXPECT_NEAR(outcome.losses[step], plain.losses[step], 0.02 * plain.losses[step]) << schedule;
      }
  });
}

TEST(Pipeline, ATableWrittenByHandTrainsToParity) {
  const auto table = schedule::parse_table(
      "# backward before forward where it can, the halves of one stage apart, a whole backward on the other\n"
      "rank 0: 0F0 0F1 . 0I0 0F2 0I1 0W0 0W1 0I2 0W2\n"
      "rank 1: .   1F0 1B0 1F1 1B1 1F2 1B2\n",
      "by hand");
  PipelineRun run{.spec = model("gpt2", 2), .shape = {.pipeline = 2}, .microbatches = 3, .table = table};
  const auto plain = testing::train_plainly(run);
  run_ranks(2, [&](World& world) {
    const auto outcome = testing::train_pipeline(world, run);
    testing::expect_parity(outcome, plain);
    EXPECT_EQ(outcome.executed, outcome.row);
  });
}

TEST(Pipeline, MicrobatchesMayDifferInSize) {
  PipelineRun run{.spec = model("llama", 3), .shape = {.pipeline = 2}, .microbatches = 4, .sizes = {7, 1, 3, 2}};
  const auto plain = testing::train_plainly(run);
  run_ranks(2, [&](World& world) { testing::expect_parity(testing::train_pipeline(world, run), plain); });
}

}  // namespace
}  // namespace bonfire::parity_test
