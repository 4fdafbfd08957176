// Microbatches of any length: in one step, from step to step, in evaluation, and on data-parallel ranks that see others.
#include <map>
#include <string>

#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/nn/module.h>

#include "bonfire/comm/recorder.h"
#include "bonfire/optim/optimizer.h"
#include "bonfire/pipeline/pipeline.h"
#include "bonfire/schedule/generate.h"
#include "tests/pipeline/skip_chain.h"
#include "tests/support/ranks.h"

namespace bonfire::forms_test {
namespace {

using testing::numbers;
using testing::run_ranks;

constexpr std::int64_t width = 6;
constexpr int units = 4;
constexpr double rate = 0.1;

struct LayerImpl : torch::nn::Module {
  explicit LayerImpl(int unit) : weight(register_parameter("weight", numbers({width, width}, 7 * unit))) {}
  at::Tensor weight;
};

// Values of [samples, length, width], beside them the lengths of all, and one that grows on the way. The loss is the mean of
// the samples' own.
Chain long_chain() {
  Chain chain;
  for (int unit = 0; unit < units; ++unit) chain.units.push_back(fmt::format("layer{}", unit));
  chain.build = [](UnitRange range) {
    auto root = std::make_shared<torch::nn::Module>();
    std::vector<std::shared_ptr<LayerImpl>> layers;
    for (int unit = range.begin; unit < range.end; ++unit)
      layers.push_back(root->register_module(fmt::format("layer{}", unit), std::make_shared<LayerImpl>(unit)));
    return StageModule{root, [layers, range](Tensors values, const Microbatch& microbatch) {
                         if (range.begin == 0)
                           values = {values[0], values[0].sum(2), at::full({values[0].size(0)}, values[0].size(1))};
                         for (const auto& layer : layers) {
                           values[0] = values[0] + values[0].matmul(layer->weight).tanh();
                           values[1] = at::cat({values[1], values[0].mean(2)}, 1);
                         }
                         if (range.end < units) return values;
                         const auto wrong = values[0] - microbatch.target[0];
                         return Tensors{wrong.pow(2).sum(2).mean() + values[1].pow(2).sum(1).div(values[2]).mean()};
                       }};
  };
  return chain;
}

struct Size {
  std::int64_t samples, length;
};
using Sizes = std::vector<Size>;

std::vector<Microbatch> batch_of(const Sizes& sizes, int step) {
  std::vector<Microbatch> batch;
  int at = 0;
  for (const auto& [samples, length] : sizes) {
    batch.push_back({.input = {numbers({samples, length, width}, 10 * step + at)},
                     .target = {numbers({samples, length, width}, at + 3)}});
    ++at;
  }
  return batch;
}

struct Plain {
  StageModule whole = long_chain().build({0, units});

  // Of several data-parallel ranks: the average of their means.
  double mean(const std::vector<std::vector<Microbatch>>& ranks, bool differentiate) {
    double sum = 0;
    for (const auto& batch : ranks) {
      std::int64_t samples = 0;
      for (const auto& microbatch : batch) samples += microbatch.samples();
      for (const auto& microbatch : batch) {
        const auto loss = whole.forward(microbatch.input, microbatch)[0] *
                          (static_cast<double>(microbatch.samples()) / static_cast<double>(samples * ranks.size()));
        sum += loss.item<double>();
        if (differentiate) loss.backward();
      }
    }
    return sum;
  }
  void update() {
    const at::NoGradGuard no_grad;
    for (auto& parameter : whole.module->parameters())
      parameter.sub_(parameter.grad() * rate), parameter.mutable_grad().reset();
  }
};

struct Layout {
  const char* name;
  const char* schedule;
  MeshShape shape;
  Sharded what = Sharded::none;
};

class Forms : public ::testing::TestWithParam<Layout> {};

// What each of two data-parallel ranks is given, for a step or for an evaluation.
struct Round {
  bool trains = true;
  std::vector<Sizes> sizes;
};

TEST_P(Forms, OfAnyLengthAreThoseOfOneRank) {
  const auto& [name, schedule, shape, what] = GetParam();
  const Sizes usual{{3, 5}, {3, 5}, {3, 5}, {3, 5}};
  const std::vector<Round> rounds{
      {true, {usual, usual}},
      // Longer, shorter, more and fewer microbatches than the table's, the last one smaller.
      {false, {{{3, 9}, {3, 9}}, {{3, 9}, {3, 9}}}},
      {false, {{{3, 2}, {3, 2}, {1, 2}}, {{3, 2}, {3, 2}, {1, 2}}}},
      {false, {{{2, 9}, {2, 5}, {2, 2}, {2, 9}, {1, 7}}, {{2, 9}, {2, 5}, {2, 2}, {2, 9}, {1, 7}}}},
      // A length that was evaluated is trained, and one that neither was.
      {true, {{{2, 9}, {2, 9}, {2, 9}, {1, 9}}, {{2, 9}, {2, 9}, {2, 9}, {1, 9}}}},
      {true, {{{2, 4}, {1, 11}, {2, 4}, {3, 5}}, {{2, 4}, {1, 11}, {2, 4}, {3, 5}}}},
      // Data-parallel ranks of different lengths: one knows its own already, the other does not.
      {true, {usual, {{3, 8}, {3, 8}, {3, 12}, {3, 5}}}},
      {false, {{{3, 12}}, {{3, 3}}}},
      {true, {usual, usual}},
  };
  std::vector<double> losses;
  Plain plain;
  const int ranks = shape.along(Axis::data);
  for (std::size_t round = 0; round < rounds.size(); ++round) {
    std::vector<std::vector<Microbatch>> batches;
    for (int rank = 0; rank < ranks; ++rank)
      batches.push_back(batch_of(rounds[round].sizes[static_cast<std::size_t>(rank)], static_cast<int>(round) + 50 * rank));
    losses.push_back(plain.mean(batches, rounds[round].trains));
    if (rounds[round].trains) plain.update();
  }
  run_ranks(shape.size(), [&, schedule = schedule, shape = shape, what = what](World& world) {
    const Mesh mesh = world.mesh(shape);
    PipelineOptions options{
        .schedule = schedule::generate(
            schedule, {.ranks = shape.pipeline, .microbatches = 4, .chunks = schedule::natural_chunks(schedule)}),
        .schedule_name = schedule};
    options.shard.what = what;
    Pipeline pipeline(mesh, long_chain(), options);
    std::vector<std::unique_ptr<Sgd>> optimizers;
    for (const int stage : pipeline.local_stages())
      optimizers.push_back(std::make_unique<Sgd>(pipeline.engine(stage), SgdOptions{.lr = rate}));
    const int rank = mesh.coordinate(Axis::data);
    const auto& data = mesh.group(Axis::data);
    for (std::size_t round = 0; round < rounds.size(); ++round) {
      const auto batch = batch_of(rounds[round].sizes[static_cast<std::size_t>(rank)], static_cast<int>(round) + 50 * rank);
      const auto report = rounds[round].trains ? pipeline.step(batch) : pipeline.evaluate(batch);
      EXPECT_NEAR(data.sum(report.loss) / data.size(), losses[round], 1e-12 * losses[round]) << "round " << round;
      if (!rounds[round].trains) continue;
      for (auto& optimizer : optimizers) optimizer->step();
    }
    for (const int stage : pipeline.local_stages()) {
      const auto whole = pipeline.engine(stage).full_parameters();
      for (const auto& item : pipeline.module(stage).named_parameters())
        EXPECT_LT((item.value() - plain.whole.module->named_parameters()[item.key()]).abs().max().item<double>(), 1e-13)
            << item.key();
    }
  });
}

INSTANTIATE_TEST_SUITE_P(
    Layouts, Forms,
    ::testing::Values(Layout{"one_f_one_b", "1f1b", {.pipeline = 2}}, Layout{"four_stages", "gpipe", {.pipeline = 4}},
                      Layout{"interleaved", "interleaved", {.pipeline = 2}}, Layout{"halves", "zb-h1", {.pipeline = 4}},
                      Layout{"v", "zb-v", {.pipeline = 2}}, Layout{"replicas", "1f1b", {.pipeline = 2, .replicate = 2}},
                      Layout{"sharded", "interleaved", {.pipeline = 2, .shard = 2}, Sharded::parameters}),
    [](const auto& info) { return std::string(info.param.name); });

// Shapes are announced once for each length; afterwards a step has the messages of the table and no more.
TEST(Forms, AreAnnouncedOnce) {
  run_ranks(2, [](World& world) {
    Pipeline pipeline(world.mesh({.pipeline = 2}), long_chain(),
                      {.schedule = schedule::generate("1f1b", {.ranks = 2, .microbatches = 2})});
    const auto messages = [&](const Sizes& sizes) {
      world.recorder().clear();
      world.recorder().start();
      pipeline.evaluate(batch_of(sizes, 0));
      world.recorder().stop();
      std::size_t count = 0;
      for (const auto& one : world.recorder().collectives())
        count += one.kind == CollectiveKind::send || one.kind == CollectiveKind::receive;
      return count;
    };
    pipeline.evaluate(batch_of({{3, 5}}, 0));
    EXPECT_EQ(messages({{3, 5}, {2, 5}}), 2u);
    EXPECT_EQ(messages({{3, 6}, {2, 6}}), 3u);
    EXPECT_EQ(messages({{3, 6}, {1, 5}}), 2u);
    EXPECT_EQ(messages({{3, 4}, {2, 7}}), 4u);
  });
}

}  // namespace
}  // namespace bonfire::forms_test
