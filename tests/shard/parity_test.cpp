// The first law over every model: however four ranks divide it, they train it as one rank does.
#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <fmt/format.h>

#include "bonfire/shard/engine.h"
#include "tests/support/ranks.h"
#include "tests/support/tiny_training.h"

namespace bonfire::parity_test {
namespace {

using testing::relative_distance;
using testing::run_ranks;
using testing::tiny_models;
using testing::TinyOutcome;
using testing::TinyRun;

class Parity : public ::testing::TestWithParam<std::size_t> {
 protected:
  const plan::ModelSpec& spec() const { return tiny_models()[GetParam()].spec; }

  TinyOutcome alone(bool frozen) const {
    TinyOutcome outcome;
    run_ranks(
        1, [&](World& world) { outcome = testing::train_tiny(world, {.spec = spec(), .steps = steps, .frozen = frozen}); });
    return outcome;
  }

  // Collective: trains, and compares.
  static void compare(const World& world, const TinyRun& run, const TinyOutcome& alone) {
    const auto outcome = testing::train_tiny(world, run);
    if (world.rank() != 0) return;
    const auto where = fmt::format("{} ranks, F = {}, {}, {}, accumulation {}, {}", world.size(), run.factor,
                                   plan::name_of(run.options.what), run.options.reshard_after_forward.free ? "free" : "keep",
                                   run.accumulation, run.frozen ? "half frozen" : "all trained");
    for (std::size_t step = 0; step < alone.losses.size(); ++step)
      EXPECT_NEAR(outcome.losses[step], alone.losses[step], 1e-12 * alone.losses[step]) << where;
    EXPECT_LT(relative_distance(outcome.weights, alone.weights), 1e-12) << where;
  }

  // Variants of a model that is there already take some of the cells.
  bool takes(int number) const { return GetParam() < 4 || number % 3 == 0; }

  // The first teaches the order, the second follows it.
  static constexpr int steps = 2;
};

TEST_P(Parity, OfEveryDivision) {
  const TinyOutcome expected[] = {alone(false), alone(true)};
  run_ranks(4, [&](World& world) {
    int number = 0;
    for (const bool frozen : {false, true})
      for (const int factor : {1, 2, 4})
        for (const auto what : {Sharded::none, Sharded::optimizer, Sharded::gradients, Sharded::parameters})
          for (const bool free : {true, false})
            for (const int accumulation : {1, 3}) {
              if (factor > 1 && what == Sharded::none) continue;
              if (!takes(++number)) continue;
              compare(world,
                      {.spec = spec(),
                       .accumulation = accumulation,
                       .steps = steps,
                       .frozen = frozen,
                       .factor = factor,
                       .options = {.what = what, .reshard_after_forward = free, .prefetch = accumulation - 1}},
                      expected[frozen]);
            }
  });
}

TEST_P(Parity, OfEveryNumberOfRanks) {
  const auto expected = alone(false);
  for (const int ranks : {1, 2, 3})
    run_ranks(ranks, [&](World& world) {
      for (const int accumulation : {1, 4})
        for (const auto what : {Sharded::none, Sharded::parameters})
          compare(world,
                  {.spec = spec(),
                   .accumulation = accumulation,
                   .steps = steps,
                   .factor = what == Sharded::none ? 1 : ranks,
                   .options = {.what = what}},
                  expected);
    });
}

TEST_P(Parity, TwoRunsGiveEqualBits) {
  for (const auto what : {Sharded::none, Sharded::gradients, Sharded::parameters}) {
    TinyOutcome outcomes[2];
    for (auto& outcome : outcomes)
      run_ranks(4, [&](World& world) {
        auto mine = testing::train_tiny(world, {.spec = spec(),
                                                .accumulation = 2,
                                                .dtype = at::kFloat,
                                                .factor = what == Sharded::none ? 1 : 2,
                                                .options = {.what = what}});
        if (world.rank() == 0) outcome = std::move(mine);
      });
    EXPECT_EQ(outcomes[0].losses, outcomes[1].losses);
    EXPECT_TRUE(at::equal(outcomes[0].weights, outcomes[1].weights)) << plan::name_of(what);
  }
}

INSTANTIATE_TEST_SUITE_P(EveryModel, Parity, ::testing::Range(std::size_t{0}, tiny_models().size()),
                         [](const auto& info) { return std::string(tiny_models()[info.param].name); });

}  // namespace
}  // namespace bonfire::parity_test
