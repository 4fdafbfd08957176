#include "bonfire/comm/mesh.h"

#include <gtest/gtest.h>

#include <set>

#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include "bonfire/base/error.h"
#include "bonfire/comm/mesh_state.h"
#include "bonfire/comm/progress.h"
#include "bonfire/comm/recorder.h"
#include "tests/support/ranks.h"

namespace bonfire::mesh_test {
namespace {

TEST(Mesh, TensorIsFastestAndPipelineSlowest) {
  const MeshShape shape{.pipeline = 2, .replicate = 2, .shard = 2, .tensor = 2};
  EXPECT_EQ(ranks_along(shape, Axis::tensor, 5), (std::vector<int>{4, 5}));
  EXPECT_EQ(ranks_along(shape, Axis::shard, 5), (std::vector<int>{5, 7}));
  EXPECT_EQ(ranks_along(shape, Axis::replicate, 5), (std::vector<int>{1, 5}));
  EXPECT_EQ(ranks_along(shape, Axis::pipeline, 5), (std::vector<int>{5, 13}));
  EXPECT_EQ(ranks_along(shape, Axis::data, 5), (std::vector<int>{1, 3, 5, 7}));
  EXPECT_EQ(ranks_along(shape, Axis::world, 5).size(), 16u);
}

TEST(Mesh, EveryAxisPartitionsTheWorld) {
  const MeshShape shape{.pipeline = 3, .replicate = 2, .shard = 2, .context = 1, .tensor = 2};
  for (const Axis axis :
       {Axis::pipeline, Axis::replicate, Axis::shard, Axis::context, Axis::tensor, Axis::data, Axis::world}) {
    std::set<std::vector<int>> groups;
    for (int rank = 0; rank < shape.size(); ++rank) {
      const auto members = ranks_along(shape, axis, rank);
      EXPECT_EQ(static_cast<int>(members.size()), shape.along(axis));
      EXPECT_TRUE(std::is_sorted(members.begin(), members.end()));
      EXPECT_NE(std::find(members.begin(), members.end(), rank), members.end());
      groups.insert(members);
    }
    EXPECT_EQ(static_cast<int>(groups.size()) * shape.along(axis), shape.size());
  }
}

TEST(Mesh, GroupsReduceAlongTheirAxisOnly) {
  testing::run_ranks(4, [](World& world) {
    const Mesh mesh = world.mesh({.replicate = 2, .shard = 2});
    EXPECT_EQ(mesh.coordinate(Axis::replicate), world.rank() / 2);
    EXPECT_EQ(mesh.coordinate(Axis::shard), world.rank() % 2);
    EXPECT_EQ(mesh.group(Axis::shard).sum(world.rank()), world.rank() < 2 ? 1 : 5);
    EXPECT_EQ(mesh.group(Axis::replicate).sum(world.rank()), world.rank() % 2 == 0 ? 2 : 4);
    EXPECT_EQ(mesh.group(Axis::data).sum(world.rank()), 6);
    EXPECT_EQ(mesh.group(Axis::tensor).sum(world.rank()), world.rank());
  });
}

// Over a part of the World too, in whatever order its ranks come.
TEST(Mesh, ThoseWhoShareSamplesAverageGradientsToo) {
  testing::run_ranks(9, [](World& world) {
    if (world.rank() == 4) return;
    const std::vector<int> ranks{8, 7, 6, 5, 3, 2, 1, 0};
    const Mesh mesh = world.mesh({.replicate = 2, .shard = 2, .context = 2}, ranks);
    const auto place = [&](int rank) {
      return static_cast<int>(std::find(ranks.begin(), ranks.end(), rank) - ranks.begin());
    };
    const Group copies = mesh.with_context(Axis::replicate), all = mesh.with_context(Axis::data);
    EXPECT_EQ(all.world_ranks(), ranks);
    ASSERT_EQ(copies.size(), 4);
    for (const int rank : copies.world_ranks()) EXPECT_EQ(place(rank) / 2 % 2, place(world.rank()) / 2 % 2);
    EXPECT_EQ(copies.axis(), Axis::replicate);
    EXPECT_EQ(all.axis(), Axis::data);
    EXPECT_EQ(all.sum(1), 8);
    EXPECT_EQ(copies.sum(world.rank()), mesh.coordinate(Axis::shard) == 0 ? 8 + 7 + 3 + 2 : 6 + 5 + 1 + 0);
    EXPECT_THROW(static_cast<void>(mesh.with_context(Axis::shard)), Error);
  });
  testing::run_ranks(2, [](World& world) {
    const Mesh mesh = world.mesh({.replicate = 2});
    EXPECT_EQ(mesh.with_context(Axis::replicate).name(), mesh.group(Axis::replicate).name());
  });
}

// Two ranks that issue gathers and reductions in another order than each other: over one communicator they would meet in
// different collectives.
TEST(Mesh, GathersAreInNoOrderWithReductions) {
  testing::run_ranks(4, [](World& world) {
    const Mesh mesh = world.mesh({.replicate = 2, .shard = 2});
    const Group& shard = mesh.group(Axis::shard);
    const Group& gathers = mesh.gathers();
    EXPECT_EQ(gathers.axis(), Axis::shard);
    EXPECT_EQ(gathers.name(), "shard gathers");
    EXPECT_EQ(gathers.world_ranks(), shard.world_ranks());
    for (int round = 0; round < 10; ++round) {
      auto whole = at::zeros({200}), part = at::full({100}, world.rank() + round, at::kFloat), sum = at::ones({50});
      Work gather, reduction;
      if (shard.rank() == 0) gather = gathers.all_gather(whole, part);
      reduction = shard.all_reduce(sum);
      if (shard.rank() == 1) gather = gathers.all_gather(whole, part);
      gather.wait();
      reduction.wait();
      EXPECT_EQ(sum[0].item<float>(), 2);
      const int first = shard.world_ranks()[0];
      EXPECT_EQ(whole.sum().item<float>(), 100 * (first + round) + 100 * (first + 1 + round));
    }
  });
}

TEST(Mesh, GathersAreCountedForThemselves) {
  testing::run_ranks(2, [](World& world) {
    const Mesh mesh = world.mesh({.shard = 2});
    world.recorder().start();
    mesh.group(Axis::shard).barrier().wait();
    mesh.gathers().all_gather(at::zeros({2}), at::zeros({1})).wait();
    const auto records = world.recorder().records();
    ASSERT_EQ(records.size(), 2u);
    EXPECT_EQ(records[1].what, (Collective{CollectiveKind::all_gather, Axis::shard, 8}));
    EXPECT_EQ(records[1].group, "shard gathers");
    EXPECT_EQ(records[1].sequence, 1);
    bool own_lane = false;
    for (const auto& lane : world.progress()->snapshot().lanes)
      own_lane |= lane.group == "shard gathers" && lane.collective.begun == 1;
    EXPECT_TRUE(own_lane);
    // A second mesh of the same shape goes on where the first one is.
    (void)world.mesh({.shard = 2}).gathers().barrier();
    EXPECT_EQ(world.recorder().records().back().sequence, 2);
  });
}

TEST(Mesh, SubgroupsAreNeighboursAlongTheShardAxis) {
  testing::run_ranks(4, [](World& world) {
    const Mesh mesh = world.mesh({.shard = 4});
    for (const int ranks : {2, 1, 4, 2}) {
      const Group group = mesh.group(Axis::shard).neighbours(ranks);
      EXPECT_EQ(group.size(), ranks);
      EXPECT_EQ(group.rank(), world.rank() % ranks);
      EXPECT_EQ(group.axis(), Axis::shard);
      EXPECT_EQ(group.name(), "shard groups of " + std::to_string(ranks));
      const int first = world.rank() / ranks * ranks;
      EXPECT_EQ(group.sum(world.rank()), ranks * first + ranks * (ranks - 1) / 2);
    }
    for (const int ranks : {3, 0, -2, 8}) {
      try {
        (void)mesh.group(Axis::shard).neighbours(ranks);
        ADD_FAILURE() << ranks;
      } catch (const ConfigError& error) {
        EXPECT_NE(std::string(error.what()).find("allowed are its divisors 1, 2, 4"), std::string::npos) << error.what();
      }
    }
  });
}

TEST(Mesh, SubgroupsFollowTheOtherAxes) {
  testing::run_ranks(8, [](World& world) {
    const Mesh mesh = world.mesh({.shard = 4, .tensor = 2});
    const int rank = world.rank(), first = rank / 4 * 4 + rank % 2;
    EXPECT_EQ(mesh.group(Axis::shard).neighbours(2).world_ranks(), (std::vector<int>{first, first + 2}));
  });
}

// A rank that lets a group go as soon as it has it does not take the others' connections with it.
TEST(Mesh, GroupsMayBeDroppedAtOnce) {
  testing::run_ranks(6, [](World& world) {
    for (int round = 0; round < 20; ++round) EXPECT_EQ(world.mesh({.shard = 6}).group(Axis::shard).neighbours(3).size(), 3);
  });
}

TEST(Mesh, RefusesAWrongProduct) {
  World world;
  try {
    world.mesh({.replicate = 2});
    FAIL();
  } catch (const ConfigError& error) {
    EXPECT_NE(std::string(error.what()).find("has 2 ranks, but the world has 1"), std::string::npos);
  }
}

}  // namespace
}  // namespace bonfire::mesh_test
