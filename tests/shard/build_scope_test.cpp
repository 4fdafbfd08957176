#include "bonfire/shard/build_scope.h"

#include <gtest/gtest.h>

#include <optional>

#include <ATen/ATen.h>

#include "bonfire/base/error.h"
#include "bonfire/models/model.h"
#include "bonfire/optim/optimizer.h"
#include "tests/support/ranks.h"
#include "tests/support/tiny_training.h"

namespace bonfire {
namespace {

using testing::relative_distance;
using testing::run_ranks;
using testing::tiny_data;
using testing::tiny_models;

struct Made {
  at::Tensor weights;
  std::int64_t whole = 0;  // parameters that had memory when the model had been built
};

// Trains two steps, and gives back what became of the weights.
Made train(const plan::ModelSpec& spec, const ShardOptions& options, int factor, bool in_scope,
           std::uint64_t seed_of_others) {
  Made made;
  run_ranks(factor, [&](World& world) {
    const Mesh mesh = world.mesh({.shard = factor});
    std::optional<Build> scope;
    if (in_scope) scope.emplace(mesh, options);
    auto model = build_model(spec, {.seed = world.rank() == 0 ? 5 : seed_of_others, .dtype = at::kDouble});
    scope.reset();
    std::int64_t whole = 0;
    for (const auto& parameter : model->parameters()) whole += parameter.storage().data() != nullptr;
    Engine engine = shard(mesh, *model, options);
    AdamW optimizer(engine, {.lr = 0.01});
    for (int step = 0; step < 2; ++step) {
      auto [input, target] = tiny_data(spec, step, 0, 4);
      engine.backward(model->loss(input, target));
      optimizer.step({.clip = 1});
    }
    const auto full = engine.full_parameters();
    std::vector<at::Tensor> flat;
    for (auto& parameter : model->parameters()) flat.push_back(parameter.detach().reshape(-1));
    if (world.rank() == 0) made = {at::cat(flat), whole};
  });
  return made;
}

// Law: the weights do not depend on the layout, nor on when they were sharded.
TEST(BuildScope, BuiltUnitByUnitTrainsAlike) {
  for (const auto& [name, spec] : tiny_models()) {
    const auto alone = train(spec, {.what = Sharded::parameters}, 1, false, 5);
    for (const auto start : {Start::check, Start::broadcast}) {
      // Dropout draws from the seed too, which is not broadcast.
      if (start == Start::broadcast && spec.dropout > 0) continue;
      const ShardOptions options{.what = Sharded::parameters, .start = start};
      const auto seed = start == Start::broadcast ? 6 : 5;
      const auto scoped = train(spec, options, 4, true, seed);
      EXPECT_LT(relative_distance(scoped.weights, alone.weights), 1e-12) << name;
      EXPECT_EQ(scoped.whole, 0) << name;
      EXPECT_TRUE(at::equal(scoped.weights, train(spec, options, 4, false, seed).weights)) << name;
    }
  }
}

TEST(BuildScope, WhereARankHoldsTheWholeModelNothingHappens) {
  const auto& spec = tiny_models()[0].spec;
  for (const auto what : {Sharded::optimizer, Sharded::gradients}) {
    const auto made = train(spec, {.what = what}, 2, true, 5);
    EXPECT_GT(made.whole, 0);
    EXPECT_TRUE(at::equal(made.weights, train(spec, {.what = what}, 2, false, 5).weights));
  }
}

TEST(BuildScope, SmallUnitsJoinTheOneAroundThem) {
  const auto& spec = tiny_models()[3].spec;
  const ShardOptions options{.what = Sharded::parameters, .wrapping = {.min_parameters = 1000}};
  EXPECT_TRUE(at::equal(train(spec, options, 2, true, 5).weights, train(spec, options, 2, false, 5).weights));
}

TEST(BuildScope, ValuesThatDifferBetweenRanksAreNamed) {
  try {
    train(tiny_models()[0].spec, {.what = Sharded::parameters}, 2, true, 6);
    FAIL() << "built from two seeds";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("differs between rank 0 and rank 1"), std::string::npos) << error.what();
  }
}

TEST(BuildScope, OtherOptionsThanThoseOfShardAreRefused) {
  run_ranks(2, [](World& world) {
    const Mesh mesh = world.mesh({.shard = 2});
    std::optional<Build> scope(std::in_place, mesh, ShardOptions{.what = Sharded::parameters});
    auto model = build_model(tiny_models()[0].spec, {.seed = 5});
    scope.reset();
    const ShardOptions others{.what = Sharded::parameters, .wrapping = {.all_in_one = true}};
    EXPECT_THROW(shard(mesh, *model, others), Error);
  });
}

TEST(BuildScope, PathsAreNotKnownInIt) {
  run_ranks(2, [](World& world) {
    const ShardOptions options{.what = Sharded::parameters, .wrapping = {.ignored_modules = {"head"}}};
    EXPECT_THROW(Build(world.mesh({.shard = 2}), options), ConfigError);
  });
}

}  // namespace
}  // namespace bonfire
