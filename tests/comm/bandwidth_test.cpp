#include "bonfire/comm/bandwidth.h"

#include <map>

#include <gtest/gtest.h>

#include "bonfire/base/error.h"
#include "bonfire/comm/recorder.h"
#include "tests/support/ranks.h"

namespace bonfire::bandwidth_test {
namespace {

TEST(Bandwidth, EveryKindIsMeasuredAndRight) {
  // What crosses a rank's link for each byte of the buffer, among three: an all-reduce sends two thirds of it twice.
  const std::map<CollectiveKind, double> crosses = {{CollectiveKind::all_reduce, 4.0 / 3},
                                                    {CollectiveKind::all_gather, 2.0 / 3},
                                                    {CollectiveKind::reduce_scatter, 2.0 / 3},
                                                    {CollectiveKind::broadcast, 1},
                                                    {CollectiveKind::reduce, 1},
                                                    {CollectiveKind::scatter, 2.0 / 3},
                                                    {CollectiveKind::gather, 2.0 / 3},
                                                    {CollectiveKind::all_to_all, 2.0 / 3},
                                                    {CollectiveKind::send, 1}};
  for (const auto& [kind, factor] : crosses)
    testing::run_ranks(3, [&, kind = kind, factor = factor](World& world) {
      const auto rows = measure_bandwidth(
          world, {.kind = kind, .least_bytes = 100, .most_bytes = 10'000, .factor = 10, .repeats = 2, .warmups = 1});
      ASSERT_EQ(rows.size(), 3u);
      std::int64_t asked = 100;
      for (const auto& row : rows) {
        EXPECT_EQ(row.elements % 3, 0);
        EXPECT_EQ(row.bytes, row.elements * 4);
        EXPECT_NEAR(static_cast<double>(row.bytes), static_cast<double>(asked), 12);  // a multiple of three floats
        asked *= 10;
        EXPECT_EQ(row.wrong, 0) << name_of(kind);
        EXPECT_GT(row.seconds, 0);
        EXPECT_DOUBLE_EQ(row.algorithm_bytes * row.seconds, static_cast<double>(row.bytes));
        EXPECT_DOUBLE_EQ(row.bus_bytes * row.seconds, factor * static_cast<double>(row.bytes)) << name_of(kind);
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
}  // namespace bonfire::bandwidth_test
