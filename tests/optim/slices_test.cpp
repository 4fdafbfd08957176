// The state of an engine and its optimizer by name: put together from all ranks it is that of one rank, to the bit, and
// training goes on from it in any other layout.
#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>

#include "bonfire/optim/optimizer.h"
#include "bonfire/shard/engine.h"
#include "tests/support/ranks.h"
#include "tests/support/saved_slices.h"
#include "tests/support/small_training.h"

namespace bonfire::slices_test {
namespace {

using testing::Division;
using testing::divisions;
using testing::run_ranks;
using testing::SavedSlices;
using testing::small_loss;
using testing::SmallNet;

constexpr int steps = 3;

// With a parameter that is frozen for some time.
struct Training : testing::SmallTraining {
  Training(World& world, const Division& division, ShardOptions options = {}, at::ScalarType type = at::kDouble)
      : SmallTraining(world, division, std::move(options), {.type = type, .frozen_steps = 1}) {}

  void save(SavedSlices& to, World& world) {
    to.add(engine->slices());
    to.add(optimizer->slices());
    world.group().barrier().wait();
    to.check(engine->slices());
    to.check(optimizer->slices());
  }
  void load(const SavedSlices& from) {
    from.load(engine->slices());
    engine->slices_written();
    from.load(optimizer->slices());
    optimizer->slices_written();
  }
};

// One rank, saved after `steps` steps.
struct Alone {
  Alone() {
    run_ranks(1, [&](World& world) {
      Training run(world, {});
      for (int at = 0; at < steps; ++at) run.step(at);
      run.save(saved, world);
      for (int at = steps; at < 2 * steps; ++at) losses.push_back(run.step(at));
    });
  }

  SavedSlices saved;
  std::vector<double> losses;  // of the steps after that
};

const Alone& alone() {
  static const Alone one;
  return one;
}

class Slices : public ::testing::TestWithParam<Division> {};

TEST_P(Slices, OfAllRanksAreThoseOfOne) {
  SavedSlices saved;
  run_ranks(4, [&](World& world) {
    Training run(world, GetParam());
    for (int at = 0; at < steps; ++at) run.step(at);
    run.save(saved, world);
    const auto whole = run.engine->full_parameters();
    for (const auto& item : run.net->named_parameters())
      EXPECT_TRUE(saved.at(item.key(), "value").equal(item.value())) << item.key();
  });
  for (const char* kind : {"value", "buffer", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step", "steps"}) {
    EXPECT_EQ(saved.names(kind), alone().saved.names(kind)) << kind;
    EXPECT_FALSE(saved.names(kind).empty()) << kind;
    for (const auto& name : saved.names(kind))
      EXPECT_TRUE(saved.at(name, kind).equal(alone().saved.at(name, kind))) << name << " " << kind;
  }
  EXPECT_EQ(saved.at("", "steps").item<std::int64_t>(), steps);
  EXPECT_EQ(saved.at("first.gain", "step").item<std::int64_t>(), steps);
  EXPECT_EQ(saved.at("second.gain", "step").item<std::int64_t>(), steps - 1);
}

// Into every layout, from one rank and from another one.
TEST_P(Slices, TrainingGoesOnInAnotherLayout) {
  for (const auto& from : divisions()) {
    SavedSlices saved;
    run_ranks(4, [&](World& world) {
      Training run(world, from);
      for (int at = 0; at < steps; ++at) run.step(at);
      run.save(saved, world);
    });
    run_ranks(4, [&](World& world) {
      Training run(world, GetParam());
      // A run of its own, which has come somewhere else, and lies as it does after its first steps.
      run.step(7);
      run.step(1);
      run.load(saved);
      EXPECT_EQ(run.optimizer->steps(), steps);
      EXPECT_TRUE(run.statistics.equal(saved.at("statistics", "buffer")));
      for (int at = 0; at < steps; ++at)
        EXPECT_NEAR(run.step(steps + at), alone().losses[static_cast<std::size_t>(at)], 1e-12) << "step " << at;
      run.engine->check_equal();
    });
  }
}

// Before its first step, when the order of the flat buffers and the state of the optimizer are not known yet.
TEST_P(Slices, AreWrittenBeforeTheFirstStep) {
  run_ranks(4, [&](World& world) {
    Training run(world, GetParam());
    run.net->second->gain.set_requires_grad(true);
    run.engine->backward(small_loss(run.net, 5));
    run.engine->spend_gradients();
    run.load(alone().saved);
    for (int at = 0; at < steps; ++at)
      EXPECT_NEAR(run.step(steps + at), alone().losses[static_cast<std::size_t>(at)], 1e-12) << "step " << at;
  });
}

// What forward reads follows the masters that were written.
TEST_P(Slices, OfMastersReachWhatForwardReads) {
  SavedSlices saved;
  std::vector<double> losses;
  const ShardOptions rounded{.precision = {.parameters = at::kBFloat16}};
  run_ranks(4, [&](World& world) {
    Training run(world, GetParam(), rounded, at::kFloat);
    for (int at = 0; at < steps; ++at) run.step(at);
    run.save(saved, world);
    EXPECT_EQ(saved.at("head.weight", "value").scalar_type(), at::kFloat);
    const double loss = run.step(steps);
    if (world.rank() == 0) losses.push_back(loss);
  });
  run_ranks(4, [&](World& world) {
    Training run(world, GetParam(), rounded, at::kFloat);
    run.step(7);
    run.step(1);
    run.load(saved);
    EXPECT_EQ(run.step(steps), losses.at(0));
  });
}

TEST(SlicesOfOneRank, RefuseElementsOutside) {
  run_ranks(1, [&](World& world) {
    Training run(world, {});
    const auto slices = run.engine->slices();
    const auto& slice = slices.front();
    for (const auto& [at, count] : std::vector<std::pair<std::int64_t, std::int64_t>>{{-1, 1}, {0, slice.length + 1}}) try {
        slice.write(at, at::zeros({count}));
        ADD_FAILURE() << at;
      } catch (const Error& error) {
        EXPECT_NE(std::string(error.what()).find(slice.name), std::string::npos) << error.what();
      }
  });
}

INSTANTIATE_TEST_SUITE_P(Divided, Slices, ::testing::ValuesIn(divisions()), [](const auto& info) {
  return std::string(plan::name_of(info.param.what)) + std::to_string(info.param.shard);
});

}  // namespace
}  // namespace bonfire::slices_test
