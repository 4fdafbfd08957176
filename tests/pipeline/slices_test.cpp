// The state of a pipeline by the names of the whole model: the same whatever its stages are, and training goes on from it
// with other stages, or without any.
#include <memory>
#include <vector>

#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <torch/nn/module.h>

#include "bonfire/optim/optimizer.h"
#include "tests/pipeline/four_units.h"
#include "tests/support/ranks.h"
#include "tests/support/saved_slices.h"

namespace bonfire::slices_test {
namespace {

using testing::four_units;
using testing::four_units_batch;
using testing::four_units_options;
using testing::PlainFourUnits;
using testing::run_ranks;
using testing::SavedSlices;

constexpr int steps = 3;

struct Way {
  const char* name;
  MeshShape shape;
  int chunks = 1;
  Sharded what = Sharded::none;
};

const std::vector<Way>& ways() {
  static const std::vector<Way> all{{"OneStage", {.pipeline = 1}},
                                    {"TwoStages", {.pipeline = 2}},
                                    {"FourStages", {.pipeline = 4}},
                                    {"TwoOfEach", {.pipeline = 2}, 2},
                                    {"Replicas", {.pipeline = 2, .replicate = 2}},
                                    {"ShardedState", {.pipeline = 2, .shard = 2}, 1, Sharded::optimizer},
                                    {"ShardedAll", {.pipeline = 2, .shard = 2}, 2, Sharded::parameters}};
  return all;
}

struct Training {
  Training(World& world, const Way& way, int seed)
      : pipeline(world.mesh(way.shape), four_units(seed),
                 four_units_options(way.shape.pipeline, way.chunks,
                                    {.what = way.what, .buckets = {.bucket_bytes = 300, .first_bucket_bytes = 300}})),
        optimizer(pipeline, {.lr = 0.01, .weight_decay = 0.1}) {}

  // All data-parallel ranks have the same samples.
  double step(int number) {
    const auto loss = pipeline.step(four_units_batch(number, 0)).loss;
    optimizer.step({.clip = 0.05});
    return loss;
  }

  Pipeline pipeline;
  AdamW optimizer;
};

// Losses of the steps after `steps`, of a run that was never saved.
const std::vector<double>& losses() {
  static const std::vector<double> all = [] {
    std::vector<double> found;
    run_ranks(1, [&](World& world) {
      Training run(world, ways().front(), 3);
      for (int at = 0; at < 2 * steps; ++at) found.push_back(run.step(at));
    });
    return std::vector<double>(found.begin() + steps, found.end());
  }();
  return all;
}

void save(const Way& way, SavedSlices& to) {
  run_ranks(way.shape.size(), [&](World& world) {
    Training run(world, way, 3);
    for (int at = 0; at < steps; ++at) run.step(at);
    to.add(run.pipeline.slices());
    to.add(run.optimizer.slices());
    world.group().barrier().wait();
    to.check(run.pipeline.slices());
    to.check(run.optimizer.slices());
    // What the modules of the stages hold is there under the same names; a tied weight under its first.
    for (const int stage : run.pipeline.local_stages()) {
      const auto whole = run.pipeline.engine(stage).full_parameters();
      for (const auto& item : run.pipeline.module(stage).named_parameters())
        EXPECT_TRUE(to.at(item.key() == "u3.t" ? "u0.t" : item.key(), "value").equal(item.value())) << item.key();
    }
  });
}

class PipelineSlices : public ::testing::TestWithParam<Way> {};

TEST_P(PipelineSlices, AreThoseOfTheWholeModel) {
  SavedSlices whole, saved;
  save(ways().front(), whole);
  save(GetParam(), saved);
  const std::vector<std::string> names{"u0.t", "u0.w", "u1.w", "u2.w", "u3.w"};
  for (const char* kind : {"value", "exp_avg", "exp_avg_sq", "step"}) {
    EXPECT_EQ(saved.names(kind), names) << kind;
    for (const auto& name : names)
      EXPECT_LE((saved.at(name, kind) - whole.at(name, kind)).abs().max().item<double>(), 1e-14) << name << " " << kind;
  }
  EXPECT_EQ(saved.at("", "steps").item<std::int64_t>(), steps);
}

TEST_P(PipelineSlices, TrainingGoesOnWithOtherStages) {
  for (const auto& from : ways()) {
    SavedSlices saved;
    save(from, saved);
    run_ranks(GetParam().shape.size(), [&](World& world) {
      Training run(world, GetParam(), 8);
      run.step(9);
      saved.load(run.pipeline.slices());
      run.pipeline.slices_written();
      saved.load(run.optimizer.slices());
      run.optimizer.slices_written();
      for (int at = 0; at < steps; ++at)
        EXPECT_NEAR(run.step(steps + at), losses()[static_cast<std::size_t>(at)], 1e-12) << from.name << ", step " << at;
    });
  }
}

// The steps of the optimizer are known to every stage, and to one that has no parameters as well.
TEST(PipelineSlicesOfTwo, AreSavedOnceWhereAStageHasNoParameters) {
  SavedSlices saved;
  run_ranks(2, [&](World& world) {
    Chain chain{.units = {"layer", "loss"}};
    chain.build = [](UnitRange range) {
      auto module = std::make_shared<torch::nn::Module>();
      const auto w = range.begin == 0 ? module->register_parameter("w", at::ones({6, 6}, at::kDouble)) : at::Tensor();
      return StageModule{module, [w](Tensors values, const Microbatch& microbatch) {
                           if (w.defined()) return Tensors{values[0].matmul(w)};
                           return Tensors{(values[0] - microbatch.target[0]).pow(2).mean()};
                         }};
    };
    Pipeline pipeline(world.mesh({.pipeline = 2}), chain, four_units_options(2, 1));
    AdamW optimizer(pipeline, {.lr = 0.01});
    pipeline.step(four_units_batch(0, 0));
    optimizer.step({.clip = 0.05});
    saved.add(pipeline.slices());
    saved.add(optimizer.slices());
    world.group().barrier().wait();
    saved.check(optimizer.slices());
  });
  EXPECT_EQ(saved.at("", "steps").item<std::int64_t>(), 1);
}

INSTANTIATE_TEST_SUITE_P(Divided, PipelineSlices, ::testing::ValuesIn(ways()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace bonfire::slices_test
