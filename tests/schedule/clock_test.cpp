#include "bonfire/schedule/clock.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>

#include "bonfire/base/error.h"

namespace bonfire::schedule::clock_test {
namespace {

TEST(Clock, AResourceRunsItsTasksOneAtATimeInOrder) {
  Clock clock;
  const auto one = clock.resource("one");
  const auto a = clock.task(one, 1), b = clock.task(one, 2), c = clock.task(one, 4);
  clock.run();
  EXPECT_EQ(clock.start(a), 0);
  EXPECT_EQ(clock.start(b), 1);
  EXPECT_EQ(clock.start(c), 3);
  EXPECT_EQ(clock.makespan(), 7);
  EXPECT_EQ(clock.busy(one), 7);
  EXPECT_EQ(clock.idle(one), 0);
}

// A gather is issued when a unit's forward begins, for the unit after the next: the timeline of sharded training.
TEST(Clock, CommunicationHidesBehindComputation) {
  Clock clock;
  const auto compute = clock.resource("compute"), wire = clock.resource("wire");
  const auto gather0 = clock.task(wire, 3), gather1 = clock.task(wire, 3);
  const auto forward0 = clock.task(compute, 5, {gather0});
  const auto gather2 = clock.task(wire, 3, {forward0});  // the buffer of unit 0 is free from here on
  const auto forward1 = clock.task(compute, 5, {gather1});
  const auto forward2 = clock.task(compute, 5, {gather2});
  clock.run();
  EXPECT_EQ(clock.start(forward0), 3);
  EXPECT_EQ(clock.start(gather1), 3);
  EXPECT_EQ(clock.start(gather2), 8);
  EXPECT_EQ(clock.start(forward1), 8);
  EXPECT_EQ(clock.start(forward2), 13);
  EXPECT_EQ(clock.makespan(), 18);
  EXPECT_EQ(clock.idle(compute), 3);
  EXPECT_EQ(clock.idle(wire), 9);
}

TEST(Clock, AnEmptyClockStandsStill) {
  Clock clock;
  const auto idle = clock.resource("idle");
  clock.run();
  EXPECT_EQ(clock.makespan(), 0);
  EXPECT_EQ(clock.idle(idle), 0);
  EXPECT_TRUE(clock.cycle().empty());
}

TEST(Clock, MoreCanBeIssuedAfterARun) {
  Clock clock;
  const auto one = clock.resource("one"), two = clock.resource("two");
  const auto a = clock.task(one, 1);
  clock.run();
  const auto b = clock.task(two, 1, {a});
  clock.run();
  EXPECT_EQ(clock.start(b), 1);
  EXPECT_EQ(clock.makespan(), 2);
  EXPECT_EQ(clock.busy(one), 1);
}

TEST(Clock, ADeadlockNamesWhoWaitsForWhom) {
  Clock clock;
  const auto left = clock.resource("left"), right = clock.resource("right");
  clock.task(left, 1);
  const auto a = clock.task(left, 1), b = clock.task(left, 1);
  const auto c = clock.task(right, 1, {b}), d = clock.task(right, 1);
  clock.wait(a, d);  // a, then b; b, then c; c, then d; d, then a
  const auto cycle = clock.cycle();
  ASSERT_EQ(cycle.size(), 4);
  auto sorted = cycle;
  std::sort(sorted.begin(), sorted.end());
  EXPECT_EQ(sorted, (std::vector<Task>{a, b, c, d}));
  const auto at_a = std::find(cycle.begin(), cycle.end(), a);
  EXPECT_EQ(at_a + 1 == cycle.end() ? cycle.front() : *(at_a + 1), d);
  try {
    clock.run();
    FAIL() << "a deadlock ran";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("task 1 on 'left' waits for task 4 on 'right'"), std::string::npos)
        << error.what();
  }
}

TEST(Clock, ATaskThatWaitsForItselfIsACycleOfOne) {
  Clock clock;
  const auto a = clock.task(clock.resource("one"), 1);
  clock.wait(a, a);
  EXPECT_EQ(clock.cycle(), std::vector<Task>{a});
}

TEST(Clock, RefusesTimesThatAreNone) {
  Clock clock;
  const auto one = clock.resource("one");
  EXPECT_THROW(clock.task(one, -1), Error);
  EXPECT_THROW(clock.task(one, std::numeric_limits<double>::quiet_NaN()), Error);
  EXPECT_THROW(clock.task(one, std::numeric_limits<double>::infinity()), Error);
  EXPECT_THROW(clock.task({7}, 1), Error);
  EXPECT_THROW(clock.task(one, 1, {Task{9}}), Error);
}

// The laws of the engine, on random graphs: no task is early, none is late, no two share a resource.
TEST(Clock, EveryTaskStartsExactlyWhenItCan) {
  std::mt19937 random(7);
  for (int round = 0; round < 50; ++round) {
    Clock clock;
    std::vector<Resource> resources;
    for (int i = 0; i < 4; ++i) resources.push_back(clock.resource(std::to_string(i)));
    std::vector<Task> tasks;
    std::vector<std::vector<Task>> waits;
    std::vector<double> free(4, 0), busy(4, 0), expected;
    double makespan = 0;
    for (int i = 0; i < 60; ++i) {
      std::vector<Task> after;
      for (int k = 0; k < 3 && i > 0; ++k) {
        if (random() % 2 == 0) after.push_back(tasks[random() % tasks.size()]);
      }
      const auto where = random() % 4;
      const double seconds = static_cast<double>(random() % 5);
      double start = free[where];
      for (const Task earlier : after) start = std::max(start, expected[earlier.index] + clock.seconds(earlier));
      tasks.push_back(clock.task(resources[where], seconds, after));
      expected.push_back(start);
      free[where] = start + seconds;
      busy[where] += seconds;
      makespan = std::max(makespan, free[where]);
    }
    clock.run();
    for (const Task task : tasks) ASSERT_EQ(clock.start(task), expected[task.index]) << "round " << round;
    EXPECT_EQ(clock.makespan(), makespan);
    for (int i = 0; i < 4; ++i) EXPECT_EQ(clock.busy(resources[i]), busy[i]);
  }
}

}  // namespace
}  // namespace bonfire::schedule::clock_test
