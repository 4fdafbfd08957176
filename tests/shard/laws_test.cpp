// The laws of the design over every model: parity with one rank, and exact communication.
#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include "bonfire/comm/recorder.h"
#include "bonfire/models/model.h"
#include "bonfire/plan/layout.h"
#include "bonfire/shard/engine.h"
#include "tests/support/ranks.h"
#include "tests/support/tiny_training.h"

namespace bonfire {
namespace {

using testing::relative_distance;
using testing::run_ranks;
using testing::tiny_data;
using testing::tiny_models;

testing::TinyOutcome train(const plan::ModelSpec& spec, int ranks, int accumulation) {
  testing::TinyOutcome outcome;
  run_ranks(ranks, [&](World& world) {
    auto mine = testing::train_tiny(world, {.spec = spec, .accumulation = accumulation});
    if (world.rank() == 0) outcome = std::move(mine);
  });
  return outcome;
}

class Laws : public ::testing::TestWithParam<std::size_t> {
 protected:
  const plan::ModelSpec& spec() const { return tiny_models()[GetParam()].spec; }
};

TEST_P(Laws, Parity) {
  const auto alone = train(spec(), 1, 1);
  for (const int ranks : {1, 2, 3, 4})
    for (const int accumulation : {1, 4}) {
      if (ranks == 1 && accumulation == 1) continue;
      const auto run = train(spec(), ranks, accumulation);
      for (std::size_t step = 0; step < alone.losses.size(); ++step)
        EXPECT_NEAR(run.losses[step], alone.losses[step], 1e-9 * alone.losses[step])
            << ranks << " ranks, accumulation " << accumulation;
      EXPECT_LT(relative_distance(run.weights, alone.weights), 1e-9) << ranks << " ranks, accumulation " << accumulation;
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
                          {.buckets = layout.buckets,
                           .reduction = {.compression = layout.compression, .powersgd_rank = layout.powersgd_rank}});
    for (int step = 0; step < 2; ++step) {
      if (step == 1) world.recorder().start();
      auto [input, target] = tiny_data(spec, step, 0, 2);
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
      const plan::DataParallel layout{.replicate = 2,
                                      .buckets = {.bucket_bytes = bytes, .first_bucket_bytes = bytes / 2 + 1},
                                      .compression = compression,
                                      .powersgd_rank = 2};
      const auto predicted = plan::collectives_of_step(description, layout);
      EXPECT_EQ(recorded(spec(), layout, false), predicted) << "buckets of " << bytes << " bytes";
      EXPECT_NE(recorded(spec(), layout, true), predicted);
    }
}

INSTANTIATE_TEST_SUITE_P(EveryModel, Laws, ::testing::Range(std::size_t{0}, tiny_models().size()),
                         [](const auto& info) { return std::string(tiny_models()[info.param].name); });

}  // namespace
}  // namespace bonfire
