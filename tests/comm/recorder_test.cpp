#include "bonfire/comm/recorder.h"

#include <chrono>
#include <functional>
#include <thread>

#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "bonfire/comm/progress.h"
#include "tests/support/ranks.h"

namespace bonfire::recorder_test {
namespace {

TEST(Recorder, ListsEveryCollectiveWithItsBytesAndTimes) {
  testing::run_ranks(2, [](World& world) {
    const Mesh mesh = world.mesh({.shard = 2});
    world.group().all_reduce(at::zeros({1})).wait();  // not recorded yet
    Recorder& recorder = world.recorder();
    recorder.start();
    auto output = at::empty({20});
    mesh.group(Axis::shard).all_gather(output, at::zeros({10})).wait();
    auto part = at::empty({5}, at::kDouble);
    mesh.group(Axis::shard).reduce_scatter(part, at::zeros({10}, at::kDouble)).wait();
    mesh.group(Axis::replicate).all_reduce(at::zeros({10})).wait();  // a group of one moves nothing
    world.group().all_reduce(at::zeros({3}, at::kHalf)).wait();
    recorder.stop();
    world.group().barrier().wait();

    const std::vector<Collective> want{{CollectiveKind::all_gather, Axis::shard, 80},
                                       {CollectiveKind::reduce_scatter, Axis::shard, 80},
                                       {CollectiveKind::all_reduce, Axis::world, 6}};
    EXPECT_EQ(recorder.collectives(), want);
    for (const auto& record : recorder.records()) {
      EXPECT_GT(record.start, 0);
      EXPECT_GE(record.end, record.start);
      EXPECT_EQ(record.stream, "gloo");
    }
    recorder.clear();
    EXPECT_TRUE(recorder.records().empty());
  });
}

// A collective that is captured is listed, and known to the watchdog, whenever it is done again, and not before.
TEST(Recorder, CapturedCollectivesAreNotedWhenTheyAreDoneAgain) {
  testing::run_ranks(2, [](World& world) {
    Recorder& recorder = world.recorder();
    const auto place = [&] {
      world.progress()->look();
      return world.progress()->snapshot().lanes.front().collective;
    };
    recorder.start();
    recorder.begin_capture();
    world.group().all_reduce(at::zeros({3})).wait();
    world.group().broadcast(at::zeros({2}), 0).wait();
    const auto captured = recorder.end_capture();
    EXPECT_EQ(captured.size(), 2u);
    EXPECT_TRUE(recorder.collectives().empty());
    EXPECT_EQ(place().begun, 0);

    bool over = false;
    for (int round = 0; round < 2; ++round)
      for (const auto& collective : captured) collective([&] { return over; });
    const Collective reduced{CollectiveKind::all_reduce, Axis::world, 12}, sent{CollectiveKind::broadcast, Axis::world, 8};
    EXPECT_EQ(recorder.collectives(), (std::vector<Collective>{reduced, sent, reduced, sent}));
    EXPECT_EQ(place().begun, 4);
    EXPECT_EQ(place().ended, 0);
    over = true;
    EXPECT_EQ(place().ended, 4);
    EXPECT_EQ(recorder.records().back().sequence, 4);
    recorder.stop();
    for (const auto& collective : captured) collective([] { return true; });
    EXPECT_EQ(recorder.collectives().size(), 4u);
  });
}

// Whether it comes to hold, within a limit that only a mistake reaches.
bool soon(const std::function<bool()>& condition) {
  const auto until = std::chrono::steady_clock::now() + std::chrono::minutes(1);
  while (!condition()) {
    if (std::chrono::steady_clock::now() >= until) return false;
    std::this_thread::yield();
  }
  return true;
}

// The watchdog must know although nobody records.
TEST(Recorder, TheBoardKnowsWhatHasEndedWithoutIt) {
  testing::run_ranks(2, [](World& world) {
    const Mesh mesh = world.mesh({.shard = 2});
    const auto place = [&](const std::string& name) {
      world.progress()->look();
      for (const auto& lane : world.progress()->snapshot().lanes)
        if (lane.group == name) return lane;
      return Progress::Lane();
    };
    std::vector<Transfer> transfers{{at::zeros({20}), at::zeros({10})}, {at::zeros({6}), at::zeros({3})}};
    mesh.gathers().all_gather(transfers).wait();
    mesh.gathers().reduce_scatter(transfers).wait();
    mesh.gathers().barrier().wait();
    // Gloo says that a collective has ended a moment after it lets the rank go on.
    EXPECT_TRUE(soon([&] { return place("shard gathers").collective.ended == 3; }));
    EXPECT_EQ(place("shard gathers").collective.begun, 3);

    // Rank 1 comes when rank 0 has seen that it does not.
    if (world.rank() == 1) world.store().wait({"seen"});
    Work work = world.group().barrier();
    if (world.rank() == 0) {
      EXPECT_EQ(place("world").collective.begun, 1);
      EXPECT_EQ(place("world").collective.ended, 0);
      world.store().set("seen", std::vector<std::uint8_t>{1});
    }
    work.wait();
    EXPECT_TRUE(soon([&] { return place("world").collective.ended == 1; }));

    const int other = 1 - world.rank();
    const std::vector<Message> messages{{Message::Way::send, at::ones({3}), other},
                                        {Message::Way::receive, at::empty({3}), other}};
    work = world.group().batch(messages);
    EXPECT_EQ(place("world").message.begun, 1);
    work.wait();
    EXPECT_EQ(place("world").message.ended, 1);
    EXPECT_TRUE(world.recorder().records().empty());
  });
}

}  // namespace
}  // namespace bonfire::recorder_test
