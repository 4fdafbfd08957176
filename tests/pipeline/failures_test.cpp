// A stage that throws: the others, which wait for what it would have sent, hear why, and nothing of the step is used.
#include <chrono>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/linear.h>

#include "bonfire/base/error.h"
#include "bonfire/optim/optimizer.h"
#include "bonfire/pipeline/pipeline.h"
#include "bonfire/schedule/generate.h"
#include "tests/support/ranks.h"
#include "tests/support/thrown.h"

namespace bonfire::failures_test {
namespace {

using testing::expect_part;
using testing::run_ranks;

constexpr std::int64_t width = 4;
constexpr int units = 4, microbatches = 4;

enum class Where { nowhere, forward, backward };
struct Fault {
  int unit = 0;
  Where where = Where::nowhere;
  int calls = 0;  // forwards of that unit so far: the second one is the one that fails
};

// Units of one layer each; one of them fails as `fault` says.
Chain chain_with(const std::shared_ptr<Fault>& fault) {
  Chain chain;
  for (int unit = 0; unit < units; ++unit) chain.units.push_back("u" + std::to_string(unit));
  chain.build = [fault](UnitRange range) {
    torch::nn::ModuleList layers;
    for (int unit = range.begin; unit < range.end; ++unit) layers->push_back(torch::nn::Linear(width, width));
    return StageModule{
        layers.ptr(), [=](Tensors values, const Microbatch& microbatch) {
          auto x = values[0];
          for (int unit = range.begin; unit < range.end; ++unit) {
            x = layers->ptr<torch::nn::LinearImpl>(static_cast<std::size_t>(unit - range.begin))->forward(x);
            if (unit != fault->unit || fault->where == Where::nowhere || ++fault->calls != 2) continue;
            if (fault->where == Where::forward) throw std::runtime_error("the second one is bad");
            x.register_hook([](at::Tensor) -> at::Tensor { throw std::runtime_error("the second one is bad"); });
          }
          return Tensors{range.end == units ? (x - microbatch.target[0]).pow(2).mean() : x};
        }};
  };
  return chain;
}

std::vector<Microbatch> batch() {
  return std::vector<Microbatch>(microbatches, {.input = {at::ones({2, width})}, .target = {at::zeros({2, width})}});
}

int rank_of(const Pipeline& pipeline, const World& world, int unit) {
  for (const int stage : pipeline.local_stages()) {
    const auto& range = pipeline.stages()[static_cast<std::size_t>(stage)];
    if (unit >= range.begin && unit < range.end) return world.rank();
  }
  return 1 - world.rank();
}

struct Table {
  std::string name;
  int chunks;
};
struct Case {
  Table table;
  int unit;
};

// The rank that fails would wait for the others longer than they for its messages: they must ask meanwhile.
PipelineOptions options_of(const Table& table) {
  PipelineOptions options{
      .schedule = schedule::generate(table.name, {.ranks = 2, .microbatches = microbatches, .chunks = table.chunks})};
  options.shard.patience = std::chrono::minutes(2);
  return options;
}

class Failures : public ::testing::TestWithParam<Case> {};

TEST_P(Failures, OfOneStageEndTheStepOnAll) {
  const auto& [table, unit] = GetParam();
  for (const Where where : {Where::forward, Where::backward})
    for (const int before : {0, 1})
      run_ranks(2, [&](World& world) {
        const auto fault = std::make_shared<Fault>(Fault{.unit = unit});
        Pipeline pipeline(world.mesh({.pipeline = 2}), chain_with(fault), options_of(table));
        const int failing = rank_of(pipeline, world, unit);
        Sgd sgd(pipeline.engine(pipeline.local_stages().front()), {.lr = 0.1});
        pipeline.evaluate(batch());  // what the stages send each other is known
        for (int step = 0; step < before; ++step) pipeline.step(batch());
        *fault = {.unit = unit, .where = where};
        const auto words = testing::thrown<std::exception>([&] { pipeline.step(batch()); });
        expect_part(words, world.rank() == failing ? "the second one is bad"
                                                   : fmt::format("rank {} failed: the second one is bad", failing));
        expect_part(testing::thrown<std::exception>([&] { sgd.step(); }), "threw");
      });
}

TEST_P(Failures, OfOneStageEndAnEvaluationOnAll) {
  const auto& [table, unit] = GetParam();
  run_ranks(2, [&](World& world) {
    const auto fault = std::make_shared<Fault>(Fault{.unit = unit});
    Pipeline pipeline(world.mesh({.pipeline = 2}), chain_with(fault), options_of(table));
    const int failing = rank_of(pipeline, world, unit);
    pipeline.evaluate(batch());
    *fault = {.unit = unit, .where = Where::forward};
    const auto words = testing::thrown<std::exception>([&] { pipeline.evaluate(batch()); });
    expect_part(words, world.rank() == failing ? "the second one is bad"
                                               : fmt::format("rank {} failed: the second one is bad", failing));
  });
}

INSTANTIATE_TEST_SUITE_P(Stages, Failures,
                         ::testing::Values(Case{{"1f1b", 1}, 0}, Case{{"1f1b", 1}, 3}, Case{{"zb-h1", 1}, 0},
                                           Case{{"zb-h1", 1}, 3}, Case{{"interleaved", 2}, 1}, Case{{"interleaved", 2}, 3}));

}  // namespace
}  // namespace bonfire::failures_test
