// The executor does what the table says and no more: its order, its activations, its bytes.
#include <algorithm>
#include <map>

#include <gtest/gtest.h>

#include <fmt/format.h>

#include "bonfire/comm/recorder.h"
#include "bonfire/plan/pipeline.h"
#include "bonfire/schedule/generate.h"
#include "bonfire/schedule/timeline.h"
#include "tests/support/pipeline_training.h"
#include "tests/support/ranks.h"
#include "tests/support/tiny_training.h"

namespace bonfire::executor_test {
namespace {

using testing::run_ranks;

plan::ModelSpec tied_model(std::int64_t layers) {
  auto spec = testing::tiny_models()[2].spec;
  spec.layers = layers;
  return spec;
}

TEST(Executor, GoesThroughTheTableAndKeepsAsManyActivationsAsTheClockSays) {
  run_ranks(4, [](World& world) {
    for (const auto& name : schedule::schedule_names()) {
      const schedule::Shape shape{.ranks = 4, .microbatches = 8, .chunks = schedule::natural_chunks(name)};
      const auto outcome = testing::train_pipeline(world, {.spec = tied_model(6),
                                                           .shape = {.pipeline = 4},
                                                           .schedule = name,
                                                           .microbatches = shape.microbatches,
                                                           .chunks = shape.chunks});
      EXPECT_EQ(outcome.executed, outcome.row) << name;
      const auto timeline = schedule::simulate(schedule::generate(name, shape));
      EXPECT_EQ(outcome.peak_activations, timeline.peak_activations[static_cast<std::size_t>(world.rank())]) << name;
    }
  });
}

std::vector<Collective> of(const std::vector<Collective>& list, std::initializer_list<CollectiveKind> kinds) {
  std::vector<Collective> some;
  for (const auto& one : list)
    if (std::find(kinds.begin(), kinds.end(), one.kind) != kinds.end()) some.push_back(one);
  return some;
}

std::vector<std::string> sorted_words(const std::vector<Collective>& list) {
  std::vector<std::string> words;
  for (const auto& one : list) words.push_back(to_string(one));
  std::sort(words.begin(), words.end());
  return words;
}

struct Case {
  const char* schedule;
  MeshShape shape;
  Sharded what;
};

class PipelineCommunication : public ::testing::TestWithParam<Case> {};

// Law 2: messages in their order, all else as many as the plan says.
TEST_P(PipelineCommunication, IsThePlans) {
  const auto& [name, shape, what] = GetParam();
  const auto spec = tied_model(6);
  const auto description = plan::describe(spec);
  constexpr int microbatches = 4;
  constexpr std::int64_t samples = 3, sequence = 8;
  run_ranks(shape.size(), [&](World& world) {
    const Mesh mesh = world.mesh(shape);
    PipelineOptions options{
        .schedule = schedule::generate(
            name, {.ranks = shape.pipeline, .microbatches = microbatches, .chunks = schedule::natural_chunks(name)}),
        .schedule_name = name};
    options.shard.what = what;
    options.shard.buckets = {.bucket_bytes = 4096, .first_bucket_bytes = 512};
    Pipeline pipeline(mesh, testing::chain_of_model(spec, {.dtype = at::kFloat}), options);
    std::vector<Microbatch> batch;
    for (int at = 0; at < microbatches; ++at) {
      const auto [input, target] = testing::tiny_data(spec, 0, samples * at, samples);
      batch.push_back({.input = {input}, .target = {target}});
    }
    const auto step = [&] {
      pipeline.step(batch);
      for (const int stage : pipeline.local_stages()) pipeline.engine(stage).spend_gradients();
    };
    step();
    world.recorder().start();
    step();
    world.recorder().stop();

    plan::PipelineLayout layout{
        .table = pipeline.table(), .samples = std::vector<std::int64_t>(microbatches, samples), .tokens = sequence};
    for (const auto& range : pipeline.stages()) layout.stages.push_back({range.begin, range.end});
    layout.data = {.replicate = shape.replicate, .shard = shape.shard, .what = what, .buckets = options.shard.buckets};
    auto planned = plan::collectives_of_step(description, layout, mesh.coordinate(Axis::pipeline));
    // What the optimizer and the loop would add.
    std::erase_if(planned, [](const Collective& one) { return one.axis == Axis::data; });
    if (what == Sharded::optimizer || what == Sharded::gradients)
      std::erase_if(planned, [](const Collective& one) { return one.kind == CollectiveKind::all_gather; });
    const auto recorded = world.recorder().collectives();
    const auto messages = {CollectiveKind::send, CollectiveKind::receive};
    EXPECT_EQ(of(recorded, messages), of(planned, messages)) << "rank " << world.rank();
    EXPECT_EQ(sorted_words(recorded), sorted_words(planned)) << "rank " << world.rank();
  });
}

INSTANTIATE_TEST_SUITE_P(Layouts, PipelineCommunication,
                         ::testing::Values(Case{"1f1b", {.pipeline = 4}, Sharded::none},
                                           Case{"zb-v", {.pipeline = 2}, Sharded::none},
                                           Case{"interleaved", {.pipeline = 2, .replicate = 2}, Sharded::none},
                                           Case{"1f1b", {.pipeline = 2, .shard = 2}, Sharded::optimizer},
                                           Case{"zb-h1", {.pipeline = 2, .shard = 2}, Sharded::gradients},
                                           Case{"interleaved", {.pipeline = 2, .shard = 2}, Sharded::parameters}));

}  // namespace
}  // namespace bonfire::executor_test
