// The laws of the design over every model: parity with one rank, and exact communication.
#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include "bonfire/comm/recorder.h"
#include "bonfire/models/model.h"
#include "bonfire/optim/optimizer.h"
#include "bonfire/plan/layout.h"
#include "bonfire/shard/engine.h"
#include "tests/support/ranks.h"

namespace bonfire {
namespace {

using testing::run_ranks;

constexpr std::int64_t samples = 48, sequence = 8;

struct Named {
  const char* name;
  plan::ModelSpec spec;
};

const std::vector<Named>& models() {
  using plan::ModelType;
  static const std::vector<Named> list{
      {"mlp", {.type = ModelType::mlp, .dim = 16, .layers = 2, .ffn = 24, .vocab = 32}},
      {"vgg", {.type = ModelType::vgg, .ffn = 16, .classes = 5, .image = 8, .pool = 2, .convolutions = {4, 0, 6, 0}}},
      {"gpt2", {.type = ModelType::gpt2, .dim = 16, .layers = 2, .heads = 2, .ffn = 32, .vocab = 32, .positions = sequence, .tied = true}},
      {"llama", {.type = ModelType::llama, .dim = 16, .layers = 3, .heads = 4, .kv_heads = 2, .ffn = 24, .vocab = 32, .positions = sequence}},
      {"tied_llama", {.type = ModelType::llama, .dim = 16, .layers = 1, .heads = 2, .ffn = 24, .vocab = 32, .positions = sequence, .tied = true}},
      {"gpt2_with_dropout", {.type = ModelType::gpt2, .dim = 16, .layers = 2, .heads = 2, .ffn = 32, .vocab = 32, .positions = sequence, .dropout = 0.2}},
  };
  return list;
}

// Samples [begin, begin + count) of a step.
std::pair<at::Tensor, at::Tensor> data(const plan::ModelSpec& spec, int step, std::int64_t begin, std::int64_t count) {
  if (spec.type == plan::ModelType::vgg) {
    const auto all = at::arange(samples * 3 * spec.image * spec.image, at::kDouble).add(step * 1000).mul(0.37).sin().view({samples, 3, spec.image, spec.image});
    return {all.narrow(0, begin, count), at::arange(samples).add(step).remainder(spec.classes).narrow(0, begin, count)};
  }
  const auto all = at::arange(samples * (sequence + 1)).mul(7 + 2 * step).add(step).remainder(31).view({samples, sequence + 1});
  return {all.narrow(0, begin, count).narrow(1, 0, sequence).contiguous(), all.narrow(0, begin, count).narrow(1, 1, sequence).contiguous()};
}

struct Outcome {
  std::vector<double> losses;
  at::Tensor weights;
};

Outcome train(const plan::ModelSpec& spec, int ranks, int accumulation, int steps = 3) {
  Outcome outcome;
  run_ranks(ranks, [&](World& world) {
    auto model = build_model(spec, {.seed = 5, .dtype = at::kDouble});
    const Mesh mesh = world.mesh({.replicate = ranks});
    Engine engine = shard(mesh, *model, {.buckets = {.bucket_bytes = 4096, .first_bucket_bytes = 512}});
    AdamW optimizer(engine, {.lr = 0.01, .weight_decay = 0.1});
    const std::int64_t mine = samples / ranks, part = mine / accumulation;
    for (int step = 0; step < steps; ++step) {
      double sum = 0;
      for (int micro = 0; micro < accumulation; ++micro) {
        const std::int64_t begin = world.rank() * mine + micro * part;
        const auto [input, target] = data(spec, step, begin, part);
        model->set_dropout(static_cast<std::uint64_t>(step), begin);
        const auto loss = model->loss(input, target) / accumulation;
        sum += loss.item<double>();
        micro + 1 < accumulation ? engine.accumulate(loss) : engine.backward(loss);
      }
      optimizer.step({.clip = 1.0});
      const double mean = mesh.group(Axis::data).sum(sum) / ranks;
      if (world.rank() == 0) outcome.losses.push_back(mean);
    }
    engine.check_equal();
    if (world.rank() != 0) return;
    std::vector<at::Tensor> flat;
    for (auto& parameter : model->parameters()) flat.push_back(parameter.detach().reshape(-1));
    outcome.weights = at::cat(flat);
  });
  return outcome;
}

class Laws : public ::testing::TestWithParam<std::size_t> {
 protected:
  const plan::ModelSpec& spec() const { return models()[GetParam()].spec; }
};

TEST_P(Laws, Parity) {
  const auto alone = train(spec(), 1, 1);
  for (const int ranks : {1, 2, 3, 4})
    for (const int accumulation : {1, 4}) {
      if (ranks == 1 && accumulation == 1) continue;
      const auto run = train(spec(), ranks, accumulation);
      for (std::size_t step = 0; step < alone.losses.size(); ++step)
        EXPECT_NEAR(run.losses[step], alone.losses[step], 1e-9 * alone.losses[step]) << ranks << " ranks, accumulation " << accumulation;
      const double off = ((run.weights - alone.weights).norm() / alone.weights.norm()).item<double>();
      EXPECT_LT(off, 1e-9) << ranks << " ranks, accumulation " << accumulation;
    }
}

TEST_P(Laws, TwoRunsGiveEqualBits) {
  const auto first = train(spec(), 3, 2), second = train(spec(), 3, 2);
  EXPECT_EQ(first.losses, second.losses);
  EXPECT_TRUE(at::equal(first.weights, second.weights));
}

// What the second step really moved, and whether somebody slipped in one gather more.
std::vector<Collective> recorded(const plan::ModelSpec& spec, const plan::DataParallel& layout, bool one_more) {
  std::vector<Collective> list;
  run_ranks(layout.replicate, [&](World& world) {
    auto model = build_model(spec, {.seed = 5, .dtype = at::kFloat});
    const Mesh mesh = world.mesh({.replicate = layout.replicate});
    Engine engine = shard(mesh, *model,
                          {.buckets = layout.buckets, .reduction = {.compression = layout.compression, .powersgd_rank = layout.powersgd_rank}});
    for (int step = 0; step < 2; ++step) {
      if (step == 1) world.recorder().start();
      auto [input, target] = data(spec, step, 0, 2);
      if (input.is_floating_point()) input = input.to(at::kFloat);
      engine.backward(model->loss(input, target));
      engine.spend_gradients();
      if (one_more) {
        auto all = at::empty({layout.replicate});
        mesh.group(Axis::replicate).all_gather(all, at::zeros({1})).wait();
      }
      mesh.group(Axis::data).sum(1);
    }
    world.recorder().stop();
    if (world.rank() == 0) list = world.recorder().collectives();
  });
  return list;
}

TEST_P(Laws, ExactCommunication) {
  const auto description = plan::describe(spec());
  for (const auto compression : {plan::Compression::none, plan::Compression::bf16, plan::Compression::powersgd})
    for (const std::int64_t bytes : {1, 3000, 1 << 20}) {
      const plan::DataParallel layout{.replicate = 2, .buckets = {.bucket_bytes = bytes, .first_bucket_bytes = bytes / 2 + 1}, .compression = compression, .powersgd_rank = 2};
      const auto predicted = plan::collectives_of_step(description, layout);
      EXPECT_EQ(recorded(spec(), layout, false), predicted) << "buckets of " << bytes << " bytes";
      EXPECT_NE(recorded(spec(), layout, true), predicted);
    }
}

INSTANTIATE_TEST_SUITE_P(EveryModel, Laws, ::testing::Range(std::size_t{0}, models().size()),
                         [](const auto& info) { return std::string(models()[info.param].name); });

}  // namespace
}  // namespace bonfire
