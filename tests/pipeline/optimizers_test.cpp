// One optimizer over all stages of a pipeline does what torch's does on one rank: however stages and their state are
// divided, with one norm, in which weights that several stages have count once.
#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include "bonfire/optim/clip.h"
#include "bonfire/optim/grad_scaler.h"
#include "bonfire/optim/optimizer.h"
#include "tests/pipeline/four_units.h"
#include "tests/support/ranks.h"

namespace bonfire::optimizers_test {
namespace {

using testing::distance;
using testing::four_units;
using testing::four_units_batch;
using testing::four_units_options;
using testing::PlainFourUnits;
using testing::run_ranks;

struct Way {
  const char* name;
  MeshShape shape;
  int chunks = 1;
  Sharded what = Sharded::none;
};

class OverStages : public ::testing::TestWithParam<Way> {
 protected:
  static int data_ranks() { return GetParam().shape.along(Axis::data); }
  void on_ranks(const std::function<void(Pipeline&, int data_rank)>& body) {
    const auto& way = GetParam();
    run_ranks(way.shape.size(), [&](World& world) {
      const Mesh mesh = world.mesh(way.shape);
      Pipeline pipeline(mesh, four_units(),
                        four_units_options(way.shape.pipeline, way.chunks,
                                           {.what = way.what, .buckets = {.bucket_bytes = 300, .first_bucket_bytes = 300}}));
      body(pipeline, mesh.coordinate(Axis::data));
    });
  }
};

TEST_P(OverStages, AdamWIsTorchs) {
  on_ranks([&](Pipeline& pipeline, int data_rank) {
    // The last stage has it under another path.
    const auto is_tied = [](const std::string& name, const at::Tensor&) { return name == "u0.t"; };
    AdamW ours(pipeline, {.lr = 0.01, .weight_decay = 0.1, .rules = {{is_tied, 2, 0.3}}});
    PlainFourUnits plain;
    using Group = torch::optim::OptimizerParamGroup;
    std::vector<at::Tensor> others;
    for (const auto& [name, weight] : plain.weights)
      if (name != "u0.t") others.push_back(weight);
    const auto with = [](double lr, double decay) {
      return std::make_unique<torch::optim::AdamWOptions>(torch::optim::AdamWOptions(lr).weight_decay(decay));
    };
    torch::optim::AdamW theirs(
        std::vector<Group>{Group({plain.weights.at("u0.t")}, with(0.02, 0.3)), Group(others, with(0.01, 0.1))});
    for (int step = 0; step < 4; ++step) {
      const auto report = pipeline.step(four_units_batch(step, data_rank));
      const double loss = plain.backward(step, data_ranks());
      if (data_ranks() == 1) EXPECT_NEAR(report.loss, loss, 1e-12);
      ours.step();
      theirs.step();
    }
    EXPECT_EQ(ours.steps(), 4);
    EXPECT_LT(distance(pipeline, plain), 1e-12);
  });
}

TEST_P(OverStages, OneNormClipsAllStagesAndCountsTiedWeightsOnce) {
  on_ranks([&](Pipeline& pipeline, int data_rank) {
    Sgd ours(pipeline, {.lr = 0.1, .momentum = 0.9});
    PlainFourUnits plain;
    torch::optim::SGD theirs(plain.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    for (int step = 0; step < 4; ++step) {
      pipeline.step(four_units_batch(step, data_rank));
      plain.backward(step, data_ranks());
      const double limit = step == 2 ? 0.01 : 0;
      if (limit > 0) torch::nn::utils::clip_grad_value_(plain.parameters(), limit);
      const double norm = torch::nn::utils::clip_grad_norm_(plain.parameters(), 0.05);
      EXPECT_GT(norm, 0.05);
      // By the optimizer, or by hand before it.
      double mine = 0;
      if (step == 3) {
        EXPECT_NEAR(gradient_norm(pipeline), norm, 1e-12 * norm);
        mine = clip_norm(pipeline, 0.05);
        ours.step();
      } else {
        mine = ours.step({.clip = 0.05, .clip_value = limit}).gradient_norm;
      }
      EXPECT_NEAR(mine, norm, 1e-12 * norm);
      theirs.step();
    }
    EXPECT_LT(distance(pipeline, plain), 1e-12);
  });
}

// An infinity on the last stage: all stages of all ranks drop the step.
TEST_P(OverStages, AllSkipTheSameStep) {
  on_ranks([&](Pipeline& pipeline, int data_rank) {
    AdamW ours(pipeline, {.lr = 0.01});
    PlainFourUnits plain;
    torch::optim::AdamW theirs(plain.parameters(), torch::optim::AdamWOptions(0.01).weight_decay(0));
    GradScaler scaler({.scale = 64});
    for (int step = 0; step < 3; ++step) {
      pipeline.step(four_units_batch(step, data_rank), {.loss_scale = scaler.scale()});
      const bool bad = step == 1;
      for_each_gradient(pipeline, [&](const std::string& name, at::Tensor share) {
        if (bad && name == "u3.w") share[0] = std::numeric_limits<double>::infinity();
      });
      EXPECT_EQ(ours.step({.clip = 0.5, .scaler = &scaler}).skipped, bad);
      if (bad) continue;
      plain.backward(step, data_ranks());
      torch::nn::utils::clip_grad_norm_(plain.parameters(), 0.5);
      theirs.step();
    }
    EXPECT_EQ(scaler.scale(), 32);
    EXPECT_EQ(ours.steps(), 2);
    EXPECT_LT(distance(pipeline, plain), 1e-12);
  });
}

TEST_P(OverStages, AnUpdateNeedsAStepAndThePipeline) {
  on_ranks([&](Pipeline& given, int data_rank) {
    std::optional<Pipeline> pipeline(std::move(given));
    Sgd ours(*pipeline, {.lr = 0.1});
    const auto refusal = [&] {
      try {
        ours.step();
      } catch (const Error& error) {
        return std::string(error.what());
      }
      return std::string();
    };
    EXPECT_NE(refusal().find("an update before any backward"), std::string::npos) << refusal();
    pipeline->step(four_units_batch(0, data_rank));
    // Optimizers stay with a pipeline that is moved.
    std::optional<Pipeline> moved(std::move(*pipeline));
    pipeline.reset();
    ours.step();
    EXPECT_NE(refusal().find("a second update with the same gradients"), std::string::npos) << refusal();
    moved.reset();
    EXPECT_NE(refusal().find("Pipeline of this optimizer is gone"), std::string::npos) << refusal();
  });
}

INSTANTIATE_TEST_SUITE_P(Divided, OverStages,
                         ::testing::Values(Way{"TwoStages", {.pipeline = 2}}, Way{"TwoOfEach", {.pipeline = 2}, 2},
                                           Way{"AllOnOneRank", {.pipeline = 1}, 4},
                                           Way{"Replicas", {.pipeline = 2, .replicate = 2}},
                                           Way{"ShardedState", {.pipeline = 2, .shard = 2}, 1, Sharded::optimizer},
                                           Way{"ShardedAll", {.pipeline = 2, .shard = 2}, 2, Sharded::parameters}),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace bonfire::optimizers_test
