// Law 1 for a chain of other people's modules, with skip connections and tied weights: every schedule for 1 to 16
// microbatches.
#include <map>

#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/nn/module.h>

#include "bonfire/optim/optimizer.h"
#include "bonfire/pipeline/pipeline.h"
#include "bonfire/schedule/generate.h"
#include "tests/pipeline/skip_chain.h"
#include "tests/support/ranks.h"

namespace bonfire::skip_test {
namespace {

using testing::skip_batch;
using testing::skip_chain;

constexpr int units = 8, steps = 2, most_microbatches = 16;
constexpr double rate = 0.05;

struct Trained {
  std::vector<double> losses;
  std::map<std::string, at::Tensor> weights;
};

Trained train_by_plain_torch(int microbatches) {
  auto whole = skip_chain(units).build({0, units});
  Trained trained;
  for (int step = 0; step < steps; ++step) {
    const auto batch = skip_batch(microbatches, step);
    std::int64_t samples = 0;
    double sum = 0;
    for (const auto& microbatch : batch) samples += microbatch.samples();
    for (const auto& microbatch : batch) {
      const auto loss = whole.forward(microbatch.input, microbatch)[0] *
                        (static_cast<double>(microbatch.samples()) / static_cast<double>(samples));
      sum += loss.item<double>();
      loss.backward();
    }
    trained.losses.push_back(sum);
    const at::NoGradGuard no_grad;
    for (auto& parameter : whole.module->parameters())
      if (parameter.grad().defined()) parameter.sub_(parameter.grad() * rate), parameter.mutable_grad().reset();
  }
  for (const auto& item : whole.module->named_parameters()) trained.weights[item.key()] = item.value().detach();
  return trained;
}

struct Case {
  const std::string& name;
  schedule::Shape shape;
};

void expect_parity(const Mesh& mesh, const Case& on, const Trained& expected) {
  SCOPED_TRACE(fmt::format("{}, {} ranks, {} chunks, {} microbatches", on.name, on.shape.ranks, on.shape.chunks,
                           on.shape.microbatches));
  Pipeline pipeline(mesh, skip_chain(units), {.schedule = schedule::generate(on.name, on.shape), .schedule_name = on.name});
  std::vector<std::unique_ptr<Sgd>> optimizers;
  for (const int stage : pipeline.local_stages())
    optimizers.push_back(std::make_unique<Sgd>(pipeline.engine(stage), SgdOptions{.lr = rate}));
  for (int step = 0; step < steps; ++step) {
    const auto report = pipeline.step(skip_batch(on.shape.microbatches, step));
    EXPECT_NEAR(report.loss, expected.losses[static_cast<std::size_t>(step)], 1e-12);
    EXPECT_EQ(report.reports.size(), 1u);
    for (auto& optimizer : optimizers) optimizer->step();
  }
  for (const int stage : pipeline.local_stages())
    for (const auto& item : pipeline.module(stage).named_parameters()) {
      // Only the first and the last Unit use the shared weight.
      if (item.key().ends_with("input") && item.key() != "block0.input") continue;
      const auto& same = expected.weights.at(item.key().ends_with("output") ? "block0.input" : item.key());
      EXPECT_LT((item.value() - same).abs().max().item<double>(), 1e-12) << item.key();
    }
}

// Whether the schedule is refused; the reason is another test's.
bool exists(const Case& on) {
  try {
    schedule::generate(on.name, on.shape);
    return true;
  } catch (const ConfigError&) {
    return false;
  }
}

class SkipParity : public ::testing::TestWithParam<int> {};

TEST_P(SkipParity, EveryScheduleAndNumberOfMicrobatches) {
  std::vector<Trained> expected;
  for (int microbatches = 1; microbatches <= most_microbatches; ++microbatches)
    expected.push_back(train_by_plain_torch(microbatches));
  std::map<std::string, int> ran;
  testing::run_ranks(GetParam(), [&](World& world) {
    const Mesh mesh = world.mesh({.pipeline = world.size()});
    for (const auto& name : schedule::schedule_names())
      for (const int chunks : {1, 2})
        for (int microbatches = 1; microbatches <= most_microbatches; ++microbatches) {
          const Case on{name, {.ranks = world.size(), .microbatches = microbatches, .chunks = chunks}};
          if (!exists(on)) continue;
          expect_parity(mesh, on, expected[static_cast<std::size_t>(microbatches - 1)]);
          if (world.rank() == 0) ++ran[fmt::format("{} {}", name, chunks)];
        }
  });
  // Those about chunks in two of them, interleaved ones where the ranks divide the microbatches, all others always.
  const int divided = most_microbatches / GetParam();
  EXPECT_EQ(ran, (std::map<std::string, int>{{"naive 1", 16},
                                             {"naive 2", 16},
                                             {"gpipe 1", 16},
                                             {"gpipe 2", 16},
                                             {"1f1b 1", 16},
                                             {"interleaved 1", divided},
                                             {"interleaved 2", divided},
                                             {"zb-h1 1", 16},
                                             {"zb-h2 1", 16},
                                             {"zb-v 2", 16}}));
}

INSTANTIATE_TEST_SUITE_P(Ranks, SkipParity, ::testing::Values(2, 4),
                         [](const auto& info) { return "ranks" + std::to_string(info.param); });

}  // namespace
}  // namespace bonfire::skip_test
