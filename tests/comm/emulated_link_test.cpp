#include "bonfire/comm/emulated_link.h"

#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include "bonfire/comm/recorder.h"
#include "tests/support/ranks.h"

namespace bonfire::emulated_link_test {
namespace {

// A lower bound on time is a law here, not a measurement: the emulated link must not be faster than it says.
TEST(EmulatedLink, CollectivesQueueOnTheLink) {
  testing::run_ranks(2, [](World& world) {
    const Group slow = world.group().over({.latency_seconds = 0.01, .bytes_per_second = 1e6});
    world.recorder().start();
    auto a = at::ones({2500}), b = at::ones({2500});  // 10,000 bytes each: 10 ms of latency and 10 ms of bytes
    const auto start = now_ns();
    Work first = slow.all_reduce(a), second = slow.all_reduce(b);
    EXPECT_TRUE(!first.done() || seconds_since(start) >= 0.020);
    first.wait();
    EXPECT_GE(seconds_since(start), 0.020);
    EXPECT_TRUE(!second.done() || seconds_since(start) >= 0.040);
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

TEST(EmulatedLink, AllGroupsOfTheShardAxisQueueOnOneLink) {
  testing::run_ranks(2, [](World& world) {
    const Mesh mesh = world.mesh({.shard = 2}).over(Axis::shard, {.latency_seconds = 0.01, .bytes_per_second = 0});
    const Group subgroup = mesh.group(Axis::shard).neighbours(2);
    auto a = at::ones({10}), b = at::ones({10}), c = at::ones({10});
    const auto start = now_ns();
    Work first = mesh.group(Axis::shard).all_reduce(a), second = mesh.gathers().all_reduce(b),
         third = subgroup.all_reduce(c);
    third.wait();
    EXPECT_GE(seconds_since(start), 0.030);
    second.wait();
    first.wait();
    EXPECT_EQ(b[0].item<float>(), 2);
  });
}

TEST(EmulatedLink, SeveralTransfersTakeOneTurn) {
  testing::run_ranks(2, [](World& world) {
    const Group slow = world.group().over({.latency_seconds = 0.01, .bytes_per_second = 1e6});
    world.recorder().start();
    // 20,000 bytes in two transfers, half of which cross the link: one latency of 10 ms, and 10 ms of bytes.
    const std::vector<Transfer> transfers{{at::ones({2500}), at::ones({1250})}, {at::ones({2500}), at::ones({1250})}};
    slow.all_gather(transfers).wait();
    const auto records = world.recorder().records();
    ASSERT_EQ(records.size(), 1u);
    EXPECT_GE(records[0].end - records[0].start, 20'000'000);
    EXPECT_EQ(seconds_over({.latency_seconds = 0.01, .bytes_per_second = 1e6}, records[0].what, 2), 0.02);
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
}  // namespace bonfire::emulated_link_test
