#include "bonfire/comm/mesh.h"

#include <gtest/gtest.h>

#include <set>

#include "bonfire/base/error.h"
#include "bonfire/comm/mesh_state.h"
#include "tests/support/ranks.h"

namespace bonfire {
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
}  // namespace bonfire
