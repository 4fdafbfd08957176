#include "bonfire/comm/emulated_link.h"

#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include "bonfire/comm/recorder.h"
#include "tests/support/ranks.h"

namespace bonfire {
namespace {

// A lower bound on time is a law here, not a measurement: the emulated link must not be faster than it says.
TEST(EmulatedLink, CollectivesQueueOnTheLink) {
  testing::run_ranks(2, [](World& world) {
    const Group slow = world.group().over({.latency_seconds = 0.01, .bytes_per_second = 1e6});
    world.recorder().start();
    auto a = at::ones({2500}), b = at::ones({2500});  // 10,000 bytes each: 10 ms of latency and 10 ms of bytes
    const auto start = now_ns();
    Work first = slow.all_reduce(a), second = slow.all_reduce(b);
    EXPECT_FALSE(first.done());
    first.wait();
    EXPECT_GE(seconds_since(start), 0.020);
    EXPECT_FALSE(second.done());
    second.wait();
    EXPECT_GE(seconds_since(start), 0.040);
    EXPECT_TRUE(second.done());
    EXPECT_EQ(a[0].item<float>(), 2);
    EXPECT_EQ(b[0].item<float>(), 2);

    const auto records = world.recorder().records();
    ASSERT_EQ(records.size(), 2u);
    EXPECT_GE(records[0].end - records[0].start, 20'000'000);
    EXPECT_GE(records[1].start, records[0].start + 20'000'000);
    EXPECT_GE(records[1].end - start, 40'000'000);
  });
}

TEST(EmulatedLink, LeavesTheOriginalGroupAlone) {
  testing::run_ranks(2, [](World& world) {
    const Mesh mesh = world.mesh({.replicate = 2});
    const Mesh slow = mesh.over(Axis::replicate, {.latency_seconds = 1000, .bytes_per_second = 0});
    (void)slow;
    EXPECT_EQ(mesh.group(Axis::replicate).sum(1), 2);  // would take a quarter of an hour over the slow one
  });
}

}  // namespace
}  // namespace bonfire
