// The laws over every sharding factor and everything that can be sharded.
#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include "bonfire/shard/engine.h"
#include "tests/support/ranks.h"
#include "tests/support/tiny_training.h"

namespace bonfire {
namespace {

using testing::relative_distance;
using testing::run_ranks;
using testing::tiny_models;
using testing::TinyOutcome;
using testing::TinyRun;

TinyOutcome train(int ranks, const TinyRun& run) {
  TinyOutcome outcome;
  run_ranks(ranks, [&](World& world) {
    auto mine = testing::train_tiny(world, run);
    if (world.rank() == 0) outcome = std::move(mine);
  });
  return outcome;
}

class Sharding : public ::testing::TestWithParam<std::size_t> {
 protected:
  const plan::ModelSpec& spec() const { return tiny_models()[GetParam()].spec; }
};

TEST_P(Sharding, Parity) {
  for (const bool frozen : {false, true}) {
    const auto alone = train(1, {.spec = spec(), .frozen = frozen});
    for (const int factor : {1, 2, 4})
      for (const auto what : {Sharded::none, Sharded::optimizer, Sharded::gradients, Sharded::parameters})
        for (const bool free : {true, false})
          for (const int accumulation : {1, 3}) {
            if (factor > 1 && what == Sharded::none) continue;
            const auto run =
                train(4, {.spec = spec(),
                          .accumulation = accumulation,
                          .frozen = frozen,
                          .factor = factor,
                          .options = {.what = what, .reshard_after_forward = free, .prefetch = accumulation - 1}});
            const auto where = fmt::format("F = {}, {}, {}, accumulation {}, {}", factor, plan::name_of(what),
                                           free ? "free" : "keep", accumulation, frozen ? "half frozen" : "all trained");
            for (std::size_t step = 0; step < alone.losses.size(); ++step)
              EXPECT_NEAR(run.losses[step], alone.losses[step], 1e-9 * alone.losses[step]) << where;
            EXPECT_LT(relative_distance(run.weights, alone.weights), 1e-9) << where;
          }
  }
}

INSTANTIATE_TEST_SUITE_P(EveryModel, Sharding, ::testing::Range(std::size_t{0}, tiny_models().size()),
                         [](const auto& info) { return std::string(tiny_models()[info.param].name); });

}  // namespace
}  // namespace bonfire
