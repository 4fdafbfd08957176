#include <chrono>
#include <stdexcept>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <fmt/format.h>

#include "bonfire/base/error.h"
#include "bonfire/comm/data_groups.h"
#include "bonfire/optim/optimizer.h"
#include "bonfire/shard/engine.h"
#include "tests/support/ranks.h"
#include "tests/support/small_net.h"
#include "tests/support/thrown.h"

// Engines over some ranks of a World.
namespace bonfire::part_of_world_test {
namespace {

using testing::run_ranks;
using testing::small_batch;
using testing::small_loss;
using testing::SmallNet;

constexpr double rate = 0.1;

// Rank `me`: 8 samples do not divide by three, so each takes another part of them, with as many samples as no other.
at::Tensor part_of_loss(SmallNet& net, int step, int me) {
  return small_loss(net, step, std::vector<std::int64_t>{0, 3, 4, 2}[static_cast<std::size_t>(me)], me + 1);
}

void expect_trains_right(const DataGroups& groups, const ShardOptions& options) {
  const int me = groups.all.rank(), ranks = groups.all.size();
  SmallNet ours, theirs;
  if (me > 0) {
    const at::NoGradGuard no_grad;
    for (auto& parameter : ours->parameters()) parameter.zero_();
  }
  Engine engine = shard(groups, ours, options);
  Sgd optimizer(engine, {.lr = rate});
  for (int step = 0; step < 3; ++step) {
    if (step == 1) {
      // All of them throw at the same place, and go on.
      auto loss = part_of_loss(ours, step, me);
      loss.register_hook([](const at::Tensor&) { throw std::runtime_error("not this one"); });
      EXPECT_THROW(engine.backward(loss), std::runtime_error);
      EXPECT_THROW(optimizer.step(), Error);
    }
    engine.backward(part_of_loss(ours, step, me));
    optimizer.step();
    for (int other = 0; other < ranks; ++other) (part_of_loss(theirs, step, other) / ranks).backward();
    const at::NoGradGuard no_grad;
    for (auto& parameter : theirs->parameters()) {
      parameter.sub_(parameter.grad() * rate);
      parameter.mutable_grad().reset();
    }
  }
  engine.check_equal();
  const auto whole = engine.full_parameters();
  const auto expected = theirs->named_parameters();
  for (const auto& item : ours->named_parameters())
    EXPECT_TRUE(at::allclose(item.value(), expected[item.key()], 0, 1e-12)) << item.key();
}

struct Way {
  MeshShape shape;
  Sharded what;
};
const std::vector<Way> ways{{{.replicate = 3}, Sharded::none},
                            {{.shard = 3}, Sharded::optimizer},
                            {{.shard = 3}, Sharded::gradients},
                            {{.shard = 3}, Sharded::parameters}};

TEST(PartOfAWorld, AMeshOfThreeRanksTrainsWhileTheFourthDoesSomethingElse) {
  for (const auto& [shape, what] : ways) {
    SCOPED_TRACE(plan::name_of(what));
    run_ranks(4, [&](World& world) {
      if (world.rank() == 2) {
        // A model of its own, in a mesh of its own.
        SmallNet net;
        Engine engine = shard(world.mesh({}, {2}), net, {});
        Sgd optimizer(engine, {.lr = rate});
        const double before = small_loss(net, 0).item<double>();
        for (int step = 0; step < 5; ++step) {
          engine.backward(small_loss(net, 0));
          optimizer.step();
        }
        EXPECT_LT(small_loss(net, 0).item<double>(), before);
      } else {
        const Mesh mesh = world.mesh(shape, {3, 0, 1});
        EXPECT_EQ(mesh.group(Axis::world).size(), 3);
        EXPECT_EQ(mesh.group(Axis::data).world_ranks(), (std::vector<int>{3, 0, 1}));
        expect_trains_right(mesh, {.what = what});
      }
      // Nobody's World is the worse for it.
      EXPECT_EQ(world.group().sum(world.rank()), 6);
    });
  }
}

TEST(PartOfAWorld, GroupsMadeByHandAreAsGood) {
  for (const auto& [shape, what] : ways) {
    SCOPED_TRACE(plan::name_of(what));
    run_ranks(4, [&](World& world) {
      if (world.rank() != 1) {
        const std::vector<int> ranks{0, 2, 3};
        DataGroups groups;
        groups.all = world.group("who trains", ranks);
        if (shape.shard > 1) {
          groups.shards = world.group("shards", ranks, Axis::shard);
          groups.gathers = world.group("gathers", ranks, Axis::shard);
        } else {
          groups.replicas = world.group("replicas", ranks, Axis::replicate);
        }
        expect_trains_right(groups, {.what = what});
      }
      EXPECT_EQ(world.group().sum(1), 4);
    });
  }
}

// Two copies, each divided over two ranks that are not neighbours, and a fifth rank that takes no part.
TEST(PartOfAWorld, ReplicasOfShardsMadeByHand) {
  for (const auto what : {Sharded::optimizer, Sharded::gradients, Sharded::parameters}) {
    SCOPED_TRACE(plan::name_of(what));
    run_ranks(5, [&](World& world) {
      if (world.rank() != 2) {
        const bool first = world.rank() == 0 || world.rank() == 3, low = world.rank() < 2;
        const std::vector<int> copy = first ? std::vector{3, 0} : std::vector{4, 1};
        const std::vector<int> place = low ? std::vector{0, 1} : std::vector{3, 4};
        DataGroups groups;
        groups.all = world.group("who trains", {0, 1, 3, 4});
        groups.shards = world.group(first ? "first shards" : "second shards", copy, Axis::shard);
        groups.gathers = world.group(first ? "first gathers" : "second gathers", copy, Axis::shard);
        groups.replicas = world.group(low ? "replicas of 1" : "replicas of 0", place, Axis::replicate);
        expect_trains_right(groups, {.what = what});
      }
      EXPECT_EQ(world.group().sum(1), 5);
    });
  }
}

// Each would take the others' parts for parts of its own.
TEST(PartOfAWorld, GathersInAnotherOrderThanShardsAreRefused) {
  run_ranks(2, [](World& world) {
    DataGroups groups;
    groups.all = world.group();
    groups.shards = world.group("shards", {0, 1}, Axis::shard);
    groups.gathers = world.group("gathers", {1, 0}, Axis::shard);
    SmallNet net;
    EXPECT_EQ(testing::thrown<ConfigError>([&] { shard(groups, net, {.what = Sharded::parameters}); }),
              "groups whose shards are ranks 0, 1 and whose gathers are ranks 1, 0; allowed: the same ranks in the same "
              "order");
  });
}

// Beyond repair: whoever waits for one of them hears why, also those who train something else.
TEST(PartOfAWorld, AFailureOfOneRankOfAPartIsHeardByAll) {
  for (const auto& [shape, what] : ways) {
    SCOPED_TRACE(plan::name_of(what));
    run_ranks(4, [&](World& world) {
      const auto words_of = [](const auto& body) -> std::string {
        try {
          body();
        } catch (const std::exception& error) {
          return error.what();
        }
        return "nothing was thrown";
      };
      if (world.rank() != 2) {
        SmallNet net;
        Engine engine = shard(world.mesh(shape, {3, 0, 1}), net, {.what = what, .patience = std::chrono::milliseconds(100)});
        auto loss = part_of_loss(net, 0, engine.groups().all.rank());
        if (world.rank() == 0) loss.register_hook([](const at::Tensor&) { throw std::runtime_error("no way back"); });
        const auto words = words_of([&] { engine.backward(loss); });
        EXPECT_NE(words.find(world.rank() == 0 ? "no way back" : "rank 0 failed: no way back"), std::string::npos) << words;
      }
      const auto words = words_of([&] { world.group().barrier().wait(); });
      EXPECT_NE(words.find("rank 0 failed: no way back"), std::string::npos) << words;
    });
  }
}

// Comparing every collective finds nothing, though a group of the whole has the same name and members.
TEST(PartOfAWorld, GroupsOfAPartAreCountedForThemselves) {
  run_ranks(4,
            [](World& world) {
              const Mesh whole = world.mesh({.replicate = 2, .shard = 2});
              EXPECT_EQ(whole.group(Axis::shard).sum(1), 2);
              if (world.rank() >= 2) {
                const Mesh part = world.mesh({.shard = 2}, {2, 3});
                part.group(Axis::shard).barrier().wait();
                EXPECT_EQ(part.group(Axis::shard).sum(world.rank()), 5);
              }
              EXPECT_EQ(whole.group(Axis::shard).sum(1), 2);
              EXPECT_EQ(world.group().sum(1), 4);
            },
            {.debug = true});
}

TEST(PartOfAWorld, RanksThatDoNotFitAreRefused) {
  run_ranks(3, [](World& world) {
    const auto message = [](const auto& body) -> std::string {
      try {
        body();
      } catch (const ConfigError& error) {
        return error.what();
      }
      return "";
    };
    EXPECT_EQ(message([&] {
                world.mesh({.shard = 2}, {world.rank(), world.rank()});
              }),
              fmt::format("a mesh of ranks {0}, {0} on rank {0} of 3: allowed are ranks of the world, each once, this one "
                          "among them",
                          world.rank()));
    EXPECT_NE(message([&] { world.mesh({.shard = 2}, {(world.rank() + 1) % 3, (world.rank() + 2) % 3}); }), "");
    EXPECT_NE(message([&] { world.mesh({.shard = 2}, {world.rank(), 3}); }), "");
    EXPECT_EQ(message([&] { world.mesh({.shard = 3}, {world.rank()}); }),
              "mesh 1 x 1 x 3 x 1 x 1 (pipeline, replicate, shard, context, tensor) has 3 ranks, but its list has 1");
    SmallNet net;
    DataGroups groups;
    groups.all = world.group();
    EXPECT_EQ(message([&] { shard(groups, net); }),
              "groups of 3 ranks in all, 1 replicas, 1 shards and 1 that gather: all must be as many as replicas times "
              "shards, and gathers as many as shards");
  });
}

}  // namespace
}  // namespace bonfire::part_of_world_test
