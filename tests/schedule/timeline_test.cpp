#include "bonfire/schedule/timeline.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "bonfire/schedule/generate.h"
#include "bonfire/schedule/lowering.h"
#include "bonfire/schedule/text.h"

namespace bonfire::schedule::timeline_test {
namespace {

TEST(Timeline, OfASmallTableByHand) {
  // Messages of 1 second; forward 2, backward 4.
  const Schedule table = parse_table("0F0 0SF0 0RB0 0B0 0U\n1RF0 1F0 1B0 1SB0 1U", "t");
  const Timeline timeline = simulate(table, Costs(StageCosts{.forward = 2, .backward = 4, .update = 1}, 1));
  EXPECT_EQ(timeline.cells[1][1].start, 3);  // 1F0, after 0F0 and its message
  EXPECT_EQ(timeline.cells[1][2].end, 9);    // 1B0
  EXPECT_EQ(timeline.cells[0][3].start, 10);
  EXPECT_EQ(timeline.makespan, 15);
  EXPECT_EQ(timeline.busy, (std::vector<double>{7, 7}));
  EXPECT_EQ(timeline.bubble, 16.0 / 30);
  EXPECT_EQ(timeline.occupied(0), 15);
  EXPECT_EQ(timeline.occupied(1), 7);
  ASSERT_EQ(timeline.messages.size(), 2);
  EXPECT_EQ(to_text(timeline.messages[0].action), "0SF0");
  EXPECT_EQ(timeline.messages[0].from, 0);
  EXPECT_EQ(timeline.messages[0].to, 1);
  EXPECT_EQ(timeline.message_spans[0].start, 2);
  EXPECT_EQ(timeline.message_spans[1].end, 10);
}

// A direction of a pair carries one message at a time, in order.
TEST(Timeline, ALinkIsBusyWithOneMessage) {
  const Schedule table = lower(parse_table("0F0 0F1 0F2\n1F0 1F1 1F2", "t"), {.receive_ahead = 100});
  const Timeline timeline = simulate(table, Costs(StageCosts{.forward = 1}, 10));
  for (int i = 0; i < 3; ++i) EXPECT_EQ(timeline.message_spans[i].start, 1 + 10 * i);
  EXPECT_EQ(timeline.makespan, 32);
}

TEST(Timeline, CostsMayDependOnStageAndLink) {
  Costs costs;
  costs.action = [](const Action& action) { return action.kind == Kind::forward ? 1.0 + action.stage : 0.0; };
  costs.message = [](const Delivery& message) { return 10.0 * (message.from + 1) + message.to; };
  const Timeline timeline = simulate(parse_table("0F0\n1F0\n2F0", "t"), costs);
  EXPECT_EQ(timeline.makespan, 1 + 11 + 2 + 22 + 3);
}

// A cheaper message or action never makes a step longer.
TEST(Timeline, GrowsWithEveryCost) {
  for (const auto& name : schedule_names()) {
    const Schedule table = lower(generate(name, {4, 8, natural_chunks(name)}));
    double before = 0;
    for (const double message : {0.0, 0.5, 1.0, 4.0}) {
      const double makespan = simulate(table, Costs(StageCosts{}, message)).makespan;
      EXPECT_GE(makespan, before) << name;
      before = makespan;
    }
    const Timeline timeline = simulate(table);
    EXPECT_LT(timeline.makespan, before);
    for (const double busy : timeline.busy) EXPECT_LE(busy, timeline.makespan);
  }
}

}  // namespace
}  // namespace bonfire::schedule::timeline_test
