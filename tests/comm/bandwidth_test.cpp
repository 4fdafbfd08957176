#include "bonfire/comm/bandwidth.h"

#include <gtest/gtest.h>

#include "bonfire/base/error.h"
#include "bonfire/comm/recorder.h"
#include "tests/support/ranks.h"

namespace bonfire {
namespace {

TEST(Bandwidth, EveryKindIsMeasuredAndRight) {
  for (const auto kind : {CollectiveKind::all_reduce, CollectiveKind::all_gather, CollectiveKind::reduce_scatter,
                          CollectiveKind::broadcast, CollectiveKind::reduce, CollectiveKind::scatter, CollectiveKind::gather,
                          CollectiveKind::all_to_all, CollectiveKind::send})
    testing::run_ranks(3, [&](World& world) {
      const auto rows = measure_bandwidth(
          world, {.kind = kind, .least_bytes = 100, .most_bytes = 10'000, .factor = 10, .repeats = 2, .warmups = 1});
      ASSERT_EQ(rows.size(), 3u);
      for (const auto& row : rows) {
        EXPECT_EQ(row.elements % 3, 0);
        EXPECT_EQ(row.wrong, 0) << name_of(kind);
        EXPECT_GT(row.seconds, 0);
        EXPECT_DOUBLE_EQ(row.bus_bytes, row.algorithm_bytes * bus_factor(kind, 3));
      }
    });
}

TEST(Bandwidth, SeveralTransfersAreMeasuredAsOne) {
  for (const auto kind : {CollectiveKind::all_gather, CollectiveKind::reduce_scatter})
    testing::run_ranks(2, [&](World& world) {
      world.recorder().start();
      const auto rows = measure_bandwidth(
          world,
          {.kind = kind, .least_bytes = 80, .most_bytes = 8000, .factor = 100, .repeats = 2, .warmups = 0, .transfers = 4});
      ASSERT_EQ(rows.size(), 2u);
      std::int64_t collectives = 0;
      for (const auto& collective : world.recorder().collectives()) collectives += collective.kind == kind;
      EXPECT_EQ(collectives, 4);
      for (const auto& row : rows) {
        EXPECT_EQ(row.wrong, 0) << name_of(kind);
        EXPECT_GT(row.issue_seconds, 0);
        EXPECT_LE(row.issue_seconds, row.seconds);
      }
    });
  World world;
  EXPECT_THROW(measure_bandwidth(world, {.transfers = 2}), Error);
}

TEST(Bandwidth, RefusesSizesThatDoNotGrow) {
  World world;
  EXPECT_THROW(measure_bandwidth(world, {.least_bytes = 10, .most_bytes = 1}), Error);
  EXPECT_THROW(measure_bandwidth(world, {.kind = CollectiveKind::send}), Error);
}

}  // namespace
}  // namespace bonfire
