// Stages whose Units are gathered one by one (reshard_after_forward): less memory, a gather for each microbatch and
// direction.
#include <algorithm>
#include <numeric>
#include <set>
#include <string>

#include <gtest/gtest.h>

#include <fmt/format.h>

#include "bonfire/base/error.h"
#include "bonfire/comm/recorder.h"
#include "bonfire/optim/optimizer.h"
#include "bonfire/plan/pipeline.h"
#include "bonfire/schedule/generate.h"
#include "tests/support/pipeline_training.h"
#include "tests/support/ranks.h"
#include "tests/support/thrown.h"
#include "tests/support/tiny_training.h"

namespace bonfire::testing::unit_gathers_test {
namespace {

constexpr int microbatches = 4;
constexpr std::int64_t samples = 3, sequence = 8;

plan::ModelSpec untied_model(std::int64_t layers) {
  auto spec = tiny_models()[3].spec;  // llama
  spec.layers = layers;
  return spec;
}

TEST(UnitGathers, Parity) {
  for (const MeshShape shape :
       {MeshShape{.pipeline = 2, .shard = 2}, MeshShape{.pipeline = 2, .replicate = 2, .shard = 2}}) {
    PipelineRun run{.spec = untied_model(6), .shape = shape, .steps = 3, .clip = 0.5};
    run.shard.what = Sharded::parameters;
    run.shard.reshard_after_forward = true;
    const auto plain = train_plainly(run);
    run_ranks(shape.size(), [&](World& world) {
      for (const auto* schedule : {"naive", "gpipe", "1f1b", "interleaved"})
        for (const int prefetch : {0, 2}) {
          SCOPED_TRACE(fmt::format("{}, {} ahead", schedule, prefetch));
          auto with = run;
          with.schedule = schedule;
          with.chunks = schedule::natural_chunks(schedule);
          with.shard.prefetch = prefetch;
          const auto outcome = train_pipeline(world, with);
          expect_parity(outcome, plain);
          for (const auto& action : outcome.row) EXPECT_FALSE(schedule::is_sharding(action.kind));
        }
    });
  }
}

struct Way {
  const char* schedule;
  int prefetch;
  BackwardPrefetch when = BackwardPrefetch::before_reduction;
};

// The copies of a weight that several stages hold.
TEST(UnitGathers, TiedWeights) {
  for (const MeshShape shape : {MeshShape{.pipeline = 1, .shard = 2}, MeshShape{.pipeline = 2, .shard = 2},
                                MeshShape{.pipeline = 2, .replicate = 2, .shard = 2}}) {
    PipelineRun run{.spec = tiny_models()[2].spec, .shape = shape, .steps = 3, .clip = 0.5};
    ASSERT_TRUE(run.spec.tied);
    run.shard.what = Sharded::parameters;
    run.shard.reshard_after_forward = true;
    const auto plain = train_plainly(run);
    run_ranks(shape.size(), [&](World& world) {
      for (const auto* schedule : {"gpipe", "1f1b", "interleaved"}) {
        SCOPED_TRACE(schedule);
        auto with = run;
        with.schedule = schedule;
        with.chunks = schedule::natural_chunks(schedule);
        expect_parity(train_pipeline(world, with), plain);
      }
    });
  }
}

std::vector<std::string> words_of(const std::vector<Collective>& list) {
  std::vector<std::string> words;
  for (const auto& one : list) words.push_back(to_string(one));
  return words;
}

// What is gathered, and the memory that takes, are the plan's, and so is all else that is sent; and it is less memory than
// the stages'.
void expect_the_plans(const plan::ModelSpec& spec, const Way& way) {
  const auto description = plan::describe(spec);
  run_ranks(4, [&](World& world) {
    SCOPED_TRACE(fmt::format("{}, {} ahead, tied = {}, rank {}", way.schedule, way.prefetch, spec.tied, world.rank()));
    const Mesh mesh = world.mesh({.pipeline = 2, .shard = 2});
    PipelineOptions options{
        .schedule = schedule::generate(
            way.schedule, {.ranks = 2, .microbatches = microbatches, .chunks = schedule::natural_chunks(way.schedule)}),
        .schedule_name = way.schedule};
    options.shard = {
        .what = Sharded::parameters, .reshard_after_forward = true, .prefetch = way.prefetch, .backward_prefetch = way.when};
    Pipeline pipeline(mesh, chain_of_model(spec, {.dtype = at::kFloat}), options);
    Sgd optimizer(pipeline, {.lr = 0.01});
    const auto step = [&](int number) {
      std::vector<Microbatch> batch;
      for (int at = 0; at < microbatches; ++at) {
        const auto [input, target] = tiny_data(spec, number, samples * at, samples);
        batch.push_back({.input = {input}, .target = {target}});
      }
      pipeline.step(batch);
      if (number == 3) world.recorder().stop();
      optimizer.step();
    };
    for (int number = 0; number < 3; ++number) step(number);
    world.recorder().clear();
    world.recorder().start();
    step(3);

    plan::PipelineLayout layout{.table = pipeline.table(),
                                .samples = std::vector<std::int64_t>(microbatches, samples),
                                .tokens = sequence,
                                .gathers_units = true};
    for (const auto& range : pipeline.stages()) layout.stages.push_back({range.begin, range.end});
    layout.data = {.shard = 2, .what = Sharded::parameters, .prefetch = way.prefetch, .backward_prefetch = way.when};
    const int rank = mesh.coordinate(Axis::pipeline);
    const auto recorded = world.recorder().collectives();
    auto planned = plan::collectives_of_step(description, layout, rank);
    // What the loop would add.
    std::erase_if(planned, [](const Collective& one) { return one.axis == Axis::data; });
    const auto gathers = [](std::vector<Collective> list) {
      std::erase_if(list, [](const Collective& one) { return one.kind != CollectiveKind::all_gather; });
      return words_of(list);
    };
    EXPECT_EQ(gathers(recorded), gathers(planned));
    const auto sorted = [](std::vector<std::string> words) {
      std::sort(words.begin(), words.end());
      return words;
    };
    EXPECT_EQ(sorted(words_of(recorded)), sorted(words_of(planned)));
    if (spec.tied) return;  // whose memory is not predicted
    const auto predicted = plan::memory_of(description, layout, {.on_host = true}, rank);
    const auto& engine = pipeline.engine(pipeline.local_stages().front());
    EXPECT_EQ(engine.pool_bytes(), predicted.gathered + predicted.whole_gradients);

    // No more than `prefetch + 1` Units of each stage are in at once, and its root. Another buffer of a size is made only
    // where all of that size are in use, so there are at most as many of each.
    std::set<std::int64_t> sizes;
    std::int64_t whole = 0;
    for (const int stage : pipeline.local_stages())
      for (const auto& flat : pipeline.engine(stage).flats()) {
        sizes.insert(flat->layout().bytes);
        whole += flat->layout().bytes;
      }
    const auto of_each = static_cast<std::int64_t>(pipeline.local_stages().size()) * (way.prefetch + 1);
    EXPECT_LE(predicted.gathered, of_each * std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0}));
    EXPECT_LT(predicted.gathered, whole);
  });
}

constexpr Way ways[] = {
    {"gpipe", 1}, {"1f1b", 0}, {"1f1b", 2}, {"1f1b", 1, BackwardPrefetch::after_reduction}, {"interleaved", 1}};

TEST(UnitGathers, BytesAndMemoryAreThePlans) {
  for (const auto& way : ways) expect_the_plans(untied_model(10), way);
}

// The root of the first stage and that of the last hold a copy of the embedding's weight.
TEST(UnitGathers, BytesAreThePlansWithTiedWeights) {
  auto spec = tiny_models()[2].spec;
  ASSERT_TRUE(spec.tied);
  spec.layers = 10;
  for (const auto& way : ways) expect_the_plans(spec, way);
}

// An evaluation between steps, of another number of microbatches, disturbs neither.
TEST(UnitGathers, EvaluationsComeBetweenSteps) {
  const auto spec = untied_model(4);
  run_ranks(4, [&](World& world) {
    double last[2] = {0, 0};
    for (const bool units : {false, true}) {
      PipelineOptions options{.schedule = schedule::generate("1f1b", {.ranks = 2, .microbatches = microbatches})};
      options.shard.what = Sharded::parameters;
      options.shard.reshard_after_forward = units;
      Pipeline pipeline(world.mesh({.pipeline = 2, .shard = 2}), chain_of_model(spec, {}), options);
      Sgd optimizer(pipeline, {.lr = 0.05});
      std::vector<Microbatch> batch;
      for (int at = 0; at < microbatches; ++at) {
        const auto [input, target] = tiny_data(spec, 0, samples * at, samples);
        batch.push_back({.input = {input}, .target = {target}});
      }
      for (int number = 0; number < 3; ++number) {
        const double before = pipeline.evaluate({batch.begin(), batch.begin() + 1 + number}).loss;
        const double trained = pipeline.step(batch).loss;
        optimizer.step();
        EXPECT_GT(before + trained, 0);
        last[units] = pipeline.evaluate(batch).loss;
        EXPECT_LT(last[units], trained);
      }
    }
    EXPECT_NEAR(last[0], last[1], 1e-12);
  });
}

TEST(UnitGathers, WhatCannotBeIsRefused) {
  const auto message = [](plan::ModelSpec spec, const char* name, ReshardAfterForward reshard) {
    std::string words;
    run_ranks(4, [&](World& world) {
      PipelineOptions options{
          .schedule =
              schedule::generate(name, {.ranks = 2, .microbatches = microbatches, .chunks = schedule::natural_chunks(name)}),
          .schedule_name = name};
      options.shard.what = Sharded::parameters;
      options.shard.reshard_after_forward = reshard;
      try {
        Pipeline pipeline(world.mesh({.pipeline = 2, .shard = 2}), chain_of_model(spec, {}), options);
      } catch (const ConfigError& error) {
        if (world.rank() == 0) words = error.what();
      }
    });
    return words;
  };
  EXPECT_NE(message(untied_model(4), "zb-h1", true).find("zb-h1 splits backward into halves"), std::string::npos);
  EXPECT_NE(message(untied_model(4), "1f1b", 2).find("reshard_after_forward = 2 in a pipeline"), std::string::npos);
  EXPECT_EQ(message(untied_model(4), "zb-h1", false), "");
}

// A Unit is freed after forward, or stays, where Units are gathered; where stages are, it has no say.
TEST(UnitGathers, AUnitsOwnWordCountsWhereUnitsAreGathered) {
  const auto gathers = [](ReshardAfterForward all, std::optional<bool> own, std::string& error) {
    std::vector<std::int64_t> counts(4);
    std::vector<std::string> words(4);
    run_ranks(4, [&](World& world) {
      PipelineOptions options{.schedule = schedule::generate("1f1b", {.ranks = 2, .microbatches = 1})};
      options.shard = {.what = Sharded::parameters, .reshard_after_forward = all, .prefetch = 0};
      options.shard.unit = [&](const std::string& path, torch::nn::Module&) {
        return UnitOptions{.reshard_after_forward = path == "blocks.0" ? own : std::nullopt};
      };
      const auto spec = untied_model(6);
      const auto me = static_cast<std::size_t>(world.rank());
      words[me] = thrown<ConfigError>([&] {
        Pipeline pipeline(world.mesh({.pipeline = 2, .shard = 2}), chain_of_model(spec, {}), options);
        const auto [input, target] = tiny_data(spec, 0, 0, samples);
        const std::vector<Microbatch> batch{{.input = {input}, .target = {target}}};
        Sgd optimizer(pipeline, {.lr = 0.01});
        for (int step = 0; step < 2; ++step) {
          if (step == 1) world.recorder().clear(), world.recorder().start();
          pipeline.step(batch);
          optimizer.step();
        }
        world.recorder().stop();
        for (const auto& one : world.recorder().collectives()) counts[me] += one.kind == CollectiveKind::all_gather;
      });
    });
    for (const auto& said : words) EXPECT_EQ(said, words.front());
    error = words.front();
    return counts.front();  // of the first stage, with the first blocks
  };
  std::string error;
  const auto freed = gathers(true, std::nullopt, error);
  EXPECT_EQ(error, "");
  EXPECT_EQ(gathers(true, true, error), freed);
  EXPECT_EQ(gathers(true, false, error), freed - 1);
  EXPECT_EQ(error, "");
  for (const bool own : {true, false}) {
    gathers({}, own, error);
    EXPECT_EQ(error,
              "stage 0 (Units 0..3): Unit 'blocks.0' has a reshard_after_forward of its own, but whole stages are gathered; "
              "allowed: ShardOptions::reshard_after_forward = true, which gathers Units one by one");
  }
}

}  // namespace
}  // namespace bonfire::testing::unit_gathers_test
