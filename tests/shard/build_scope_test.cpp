#include "bonfire/shard/build_scope.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <map>
#include <optional>
#include <vector>

#include <ATen/ATen.h>

#include "bonfire/base/error.h"
#include "bonfire/models/model.h"
#include "bonfire/nn/sequential.h"
#include "bonfire/optim/optimizer.h"
#include "bonfire/shard/freed_storage.h"
#include "bonfire/train/memory.h"
#include "tests/shard/twins.h"
#include "tests/support/build_peak.h"
#include "tests/support/rank_memory.h"
#include "tests/support/ranks.h"
#include "tests/support/tiny_training.h"

namespace bonfire::build_scope_test {
namespace {

using testing::fingerprints;
using testing::peak_of_build;
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
    for (const auto& parameter : model->parameters()) whole += has_memory(parameter);
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

// Deep enough that a Unit is little beside all of them.
std::vector<plan::ModelSpec> deep_models() {
  auto mlp = tiny_models()[0].spec, llama = tiny_models()[3].spec, tied = tiny_models()[4].spec;
  for (auto* spec : {&mlp, &llama, &tied}) {
    spec->layers = 8;
    spec->dim = 64;
    spec->ffn = 128;
  }
  return {mlp, llama, tied};
}

// A thread of the backend may be the last to hold a tensor that it has sent, for a moment: there are two.
std::int64_t sent_last(const plan::ModelDescription& model) {
  std::int64_t largest = 0;
  for (const auto& unit : model.units)
    for (const auto& parameter : unit.parameters) largest = std::max(largest, parameter.elements());
  return 2 * largest * plan::bytes_of(plan::Dtype::fp32);
}

// How many of the ranks were refused memory when all built a model, with so much for each. The allocator is theirs together.
int refused(const plan::ModelSpec& spec, const ShardOptions& options, bool in_scope, std::int64_t cap_of_a_rank) {
  constexpr int ranks = 4;
  const MemoryCap cap(c10::kCPU, ranks * cap_of_a_rank);
  std::atomic<int> count = 0;
  std::barrier all_hold_theirs(ranks);
  run_ranks(ranks, [&](World& world) {
    std::shared_ptr<Model> model;
    try {
      std::optional<Build> scope;
      if (in_scope) scope.emplace(world.mesh({.shard = ranks}), options);
      model = build_model(spec, {.seed = 5});
    } catch (const MemoryRefused&) {
      ++count;
    }
    all_hold_theirs.arrive_and_wait();
  });
  return count;
}

// Law: a build needs the shares and one Unit, and no more.
TEST(BuildScope, NeedsTheSharesAndOneUnit) {
  constexpr int ranks = 4;
  auto compute = plan::Dtype::bf16;
  for (const auto& spec : deep_models()) {
    compute = compute == plan::Dtype::fp32 ? plan::Dtype::bf16 : plan::Dtype::fp32;  // turn by turn
    const auto model = plan::describe(spec);
    const plan::DataParallel layout{.shard = ranks, .what = Sharded::parameters, .compute = compute};
    ShardOptions options{.what = Sharded::parameters, .start = Start::check};
    if (compute != plan::Dtype::fp32) options.precision.parameters = at::kBFloat16;
    const auto needed = peak_of_build(model, layout), most = needed + fingerprints(model, ranks);

    run_ranks(ranks, [&](World& world) {
      const Mesh mesh = world.mesh({.shard = ranks});
      testing::RankMemory memory;
      const Build scope(mesh, options);
      const auto built = build_model(spec, {.seed = 5});
      const auto peak = memory.peak();
      EXPECT_GE(peak, needed);
      EXPECT_LE(peak, most);
    });

    EXPECT_EQ(refused(spec, options, true, most), 0);
    EXPECT_GT(refused(spec, options, false, most), 0);
    options.start = Start::broadcast;
    EXPECT_EQ(refused(spec, options, true, most + sent_last(model)), 0);
  }
}

// A Unit with one inside it, and parameters of its own.
struct OuterImpl : torch::nn::Module {
  OuterImpl() : inner(register_module("inner", testing::Block(6))), own(register_module("own", torch::nn::Linear(6, 6))) {}
  at::Tensor forward(const at::Tensor& x) { return own->forward(inner->forward(x)); }
  testing::Block inner;
  torch::nn::Linear own;
};
BONFIRE_UNIT(Outer);

// Law: what the user's function writes does not depend on the layout, and is what training starts from.
TEST(BuildScope, UnitsAreInitialisedByTheUsersFunction) {
  // Of every Unit in the order of their ends: the block inside and the one around it, twice; the sequence comes first.
  const std::vector<std::string> types{"UnitSequential", "Block", "Outer", "Block", "Outer"};
  const auto init = [&](std::vector<std::string>* seen) {
    return [=](const BuiltUnit& unit) {
      seen->push_back(unit.type);
      EXPECT_EQ(unit.number, static_cast<std::int64_t>(seen->size()) - 1);
      for (std::size_t at = 0; at < unit.parameters.size(); ++at) {
        const auto& [name, tensor] = unit.parameters[at];
        EXPECT_EQ(name.find("inner"), std::string::npos) << "that is another Unit's";
        tensor.copy_(testing::numbers(tensor.sizes(), static_cast<std::uint64_t>(10 * unit.number) + at));
      }
    };
  };
  std::map<std::string, at::Tensor> expected;
  const auto same = [&](const torch::nn::Module& net, const std::string& what) {
    for (const auto& item : net.named_parameters()) {
      ASSERT_TRUE(expected.contains(item.key()));
      EXPECT_TRUE(at::equal(item.value(), expected.at(item.key()))) << what << ", " << item.key();
    }
  };
  const std::vector<ShardOptions> all{{.what = Sharded::optimizer},
                                      {.what = Sharded::parameters},
                                      {.what = Sharded::parameters, .wrapping = {.all_in_one = true}},
                                      {.what = Sharded::parameters, .wrapping = {.types = {"Outer"}}},
                                      {.what = Sharded::parameters, .wrapping = {.min_parameters = 50}}};
  const auto build = [&](const Mesh& mesh, const ShardOptions& options) {
    std::vector<std::string> seen;
    const Build scope(mesh, options, init(&seen));
    UnitSequential net;
    for (int at = 0; at < 2; ++at) net->push_back(Outer());
    EXPECT_EQ(seen, types);
    return net;
  };
  run_ranks(1, [&](World& world) {
    auto net = build(world.mesh({}), {});
    for (const auto& item : net->named_parameters()) expected[item.key()] = item.value().detach().clone();
    EXPECT_EQ(expected.size(), 10u);
  });
  for (const int factor : {2, 4})
    run_ranks(4, [&](World& world) {
      for (std::size_t at = 0; at < all.size(); ++at) {
        const Mesh mesh = world.mesh({.replicate = 4 / factor, .shard = factor});
        auto net = build(mesh, all[at]);
        Engine engine = shard(mesh, net, all[at]);
        const auto whole = engine.full_parameters();
        same(*net, fmt::format("F = {}, case {}", factor, at));
      }
    });
}

// A Unit that holds a sequence, which is a Unit as well and gets its children one by one.
struct FilledImpl : torch::nn::Module {
  FilledImpl() : own(register_module("own", torch::nn::Linear(6, 6))) {
    for (int at = 0; at < 2; ++at) sequence->push_back(torch::nn::Linear(6, 6));
    register_module("sequence", sequence);
  }
  at::Tensor forward(const at::Tensor& x) { return own->forward(sequence->forward(x)); }
  torch::nn::Linear own;
  UnitSequential sequence{std::make_shared<UnitSequential::Impl>()};
};
BONFIRE_UNIT(Filled);

TEST(BuildScope, UnitsMayBeFilledAfterTheyWereConstructed) {
  run_ranks(2, [](World& world) {
    const Mesh mesh = world.mesh({.shard = 2});
    for (const ShardOptions& options : {ShardOptions{.what = Sharded::parameters},
                                        ShardOptions{.what = Sharded::parameters, .wrapping = {.min_parameters = 100}}}) {
      std::map<std::string, int> calls;  // of each parameter, with the number of its Unit
      std::optional<Build> scope(std::in_place, mesh, options, [&](const BuiltUnit& unit) {
        for (const auto& [name, tensor] : unit.parameters) {
          ++calls[fmt::format("{} {}", unit.number, name)];
          tensor.fill_(static_cast<double>(unit.number + 1));
        }
      });
      Filled net;
      scope.reset();
      EXPECT_EQ(calls, (std::map<std::string, int>{{"0 0.weight", 1},
                                                   {"0 0.bias", 1},
                                                   {"0 1.weight", 1},
                                                   {"0 1.bias", 1},
                                                   {"1 own.weight", 1},
                                                   {"1 own.bias", 1}}));
      for (const auto& parameter : net->parameters()) EXPECT_FALSE(has_memory(parameter));
      Engine engine = shard(mesh, net, options);
      const auto whole = engine.full_parameters();
      for (const auto& item : net->named_parameters())
        EXPECT_TRUE(item.value().eq(item.key().starts_with("own") ? 2 : 1).all().item<bool>()) << item.key();
    }
  });
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
    train(tiny_models()[0].spec, {.what = Sharded::parameters, .start = Start::check}, 2, true, 6);
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
}  // namespace bonfire::build_scope_test
