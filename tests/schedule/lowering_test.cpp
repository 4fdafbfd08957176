#include "bonfire/schedule/lowering.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>

#include "bonfire/schedule/generate.h"
#include "bonfire/schedule/text.h"
#include "bonfire/schedule/timeline.h"
#include "bonfire/schedule/validate.h"

namespace bonfire::schedule::lowering_test {
namespace {

std::vector<Schedule> tables() {
  std::vector<Schedule> result;
  for (const auto& name : schedule_names()) {
    for (const int chunks : {1, 2, 4}) {
      const bool many = name == "naive" || name == "gpipe" || name == "interleaved";
      if (name == "zb-v" ? chunks == 2 : (many || chunks == 1)) result.push_back(generate(name, {4, 8, chunks}));
    }
  }
  return result;
}

Schedule computations(const Schedule& schedule) {
  Schedule result{schedule.stages, schedule.microbatches, {}};
  for (const auto& row : schedule.rows) {
    auto& kept = result.rows.emplace_back();
    std::copy_if(row.begin(), row.end(), std::back_inserter(kept), [](const Action& a) { return is_compute(a.kind); });
  }
  return result;
}

int count(const Schedule& schedule, Kind kind) {
  int number = 0;
  for (const auto& row : schedule.rows)
    number += static_cast<int>(std::count_if(row.begin(), row.end(), [&](const Action& a) { return a.kind == kind; }));
  return number;
}

TEST(Lowering, LeaveTheComputationsAloneAndMakeValidTables) {
  for (const Schedule& table : tables()) {
    for (const int resident : {1, 2, 3}) {
      for (const Reduce reduce : {Reduce::once, Reduce::each}) {
        for (const int ahead : {0, 1, 2, 100}) {
          const Schedule full = lower(table, {.receive_ahead = ahead,
                                              .sharded_parameters = true,
                                              .resident = resident,
                                              .reductions = true,
                                              .reduce = reduce,
                                              .tied = {{0, table.stages - 1}}});
          EXPECT_EQ(computations(full), table);
          const auto problem = find_problem(full);
          EXPECT_FALSE(problem) << problem->message;
        }
      }
    }
  }
}

TEST(Lowering, WhatAPersonWroteIsKept) {
  const Schedule table =
      lower(one_f_one_b({.ranks = 3, .microbatches = 4}), {.sharded_parameters = true, .reductions = true});
  EXPECT_EQ(lower(table, {.sharded_parameters = true, .reductions = true}), table);
  // Without updates they are added at the end of each row.
  const Schedule bare = parse_table("0F0 0B0\n1F0 1B0", "t");
  EXPECT_EQ(lower(bare, {.receive_ahead = 0}), parse_table("0F0 0SF0 0RB0 0B0 0U\n1RF0 1F0 1B0 1SB0 1U", "t"));
}

TEST(Lowering, EveryMessageIsSentWhenMadeAndReceivedWhenNeeded) {
  const Schedule table = add_messages(parse_table("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1", "t"));
  EXPECT_EQ(table, parse_table("0F0 0SF0 0F1 0SF1 0RB0 0B0 0RB1 0B1\n1RF0 1F0 1B0 1SB0 1RF1 1F1 1B1 1SB1", "t"));
  EXPECT_EQ(overlap_messages(table),
            parse_table("0F0 0SF0 0RB0 0F1 0SF1 0RB1 0B0 0B1\n1RF0 1F0 1RF1 1B0 1SB0 1F1 1B1 1SB1", "t"));
}

TEST(Lowering, BothCellsOfAMessageNameEachOthersRank) {
  for (const Schedule& plain : tables()) {
    const Schedule table = lower(plain);
    const Index index(table);
    int ends = 0;
    for (int rank = 0; rank < table.ranks(); ++rank) {
      for (const Action& action : table.rows[rank]) {
        if (!is_message(action.kind)) continue;
        const bool forward = action.kind == Kind::send_forward || action.kind == Kind::receive_forward;
        const Kind other = forward ? (is_send(action.kind) ? Kind::receive_forward : Kind::send_forward)
                                   : (is_send(action.kind) ? Kind::receive_backward : Kind::send_backward);
        const int step = is_send(action.kind) == forward ? 1 : -1;
        EXPECT_EQ(index.peer(action), index.find(other, action.stage + step, action.microbatch).rank) << to_text(action);
        EXPECT_NE(index.peer(action), rank);
        ++ends;
      }
    }
    EXPECT_GT(ends, 0);
  }
}

// Rank 1 needs microbatch 1 before 0, but it is sent after: both are received before the first is needed.
TEST(Lowering, ReceivesKeepTheOrderOfTheSends) {
  const Schedule table = add_messages(parse_table("0F0 0F1\n1F1 1F0", "t"));
  EXPECT_EQ(table, parse_table("0F0 0SF0 0F1 0SF1\n1RF0 1RF1 1F1 1F0", "t"));
  EXPECT_FALSE(find_problem(table));
}

TEST(Lowering, StagesOnOneRankNeedNoMessages) {
  const Schedule turn = lower(zb_v({.ranks = 1, .microbatches = 3, .chunks = 2}));
  EXPECT_EQ(count(turn, Kind::send_forward), 0);
  const Schedule table = lower(zb_v({.ranks = 4, .microbatches = 8, .chunks = 2}));
  EXPECT_EQ(count(table, Kind::send_forward), 6 * 8);  // seven borders, of which one is inside the last rank
  EXPECT_EQ(count(table, Kind::receive_backward), 6 * 8);
}

// A receive that is issued late makes the message wait for it; one that is issued a computation ahead does not.
TEST(Lowering, OverlapHidesMessages) {
  const Costs costs(StageCosts{.forward = 10, .backward = 20}, 2);
  for (const Schedule& table : {gpipe({.ranks = 4, .microbatches = 16}), one_f_one_b({.ranks = 4, .microbatches = 16})}) {
    const double late = simulate(add_messages(table), costs).makespan;
    const double ahead = simulate(overlap_messages(add_messages(table)), costs).makespan;
    const double implied = simulate(table, costs).makespan;  // no receive is ever late
    EXPECT_LT(ahead, late);
    EXPECT_EQ(ahead, implied);
  }
  // GPipe hides all but the way of the first microbatch forward and of the last one back.
  const Schedule table = overlap_messages(add_messages(gpipe({.ranks = 4, .microbatches = 16})));
  EXPECT_EQ(simulate(table, costs).makespan, (16 + 3) * 30 + 2 * 3 * 2);
}

TEST(Lowering, NoMoreStagesAreGatheredThanMayBe) {
  for (const Schedule& table : tables()) {
    int gathers_before = 0;
    for (const int resident : {4, 3, 2, 1}) {
      const Schedule sharded = add_sharding(table, resident);
      for (const auto& row : sharded.rows) {
        std::set<int> gathered;
        for (const Action& action : row) {
          if (action.kind == Kind::unshard) gathered.insert(action.stage);
          if (action.kind == Kind::reshard) gathered.erase(action.stage);
          ASSERT_LE(gathered.size(), resident);
          ASSERT_TRUE(!is_compute(action.kind) || action.kind == Kind::update || gathered.contains(action.stage));
        }
        EXPECT_TRUE(gathered.empty());
      }
      const int gathers = count(sharded, Kind::unshard);
      EXPECT_EQ(gathers, count(sharded, Kind::reshard));
      EXPECT_GE(gathers, gathers_before);  // less room cannot need fewer
      EXPECT_GE(gathers, table.stages);
      gathers_before = gathers;
    }
  }
  // One stage a rank: gathered once, for the whole step.
  EXPECT_EQ(count(add_sharding(one_f_one_b({.ranks = 4, .microbatches = 8}), 1), Kind::unshard), 4);
}

// With room for two, the next stage is gathered while the one before it computes.
TEST(Lowering, GathersHideBehindComputation) {
  const Schedule table = gpipe({.ranks = 1, .microbatches = 4, .chunks = 4});
  const StageCosts costs{.forward = 1, .backward = 2, .unshard = 3};
  const double work = 4 * 4 * 3;
  // Only the first gather is waited for: every later one fits behind 4 forwards or 4 backwards.
  EXPECT_EQ(simulate(add_sharding(table, 2), costs).makespan, work + 3);
  // All forwards and then all backwards: the last stage stays, the other three are gathered twice.
  EXPECT_EQ(simulate(add_sharding(table, 1), costs).makespan, work + 7 * 3);
}

TEST(Lowering, GradientsAreReducedAsSoonAsTheyAreComplete) {
  const Schedule table = zb_h1({.ranks = 3, .microbatches = 4});
  const Schedule once = add_reductions(table, Reduce::once), each = add_reductions(table, Reduce::each);
  EXPECT_EQ(count(once, Kind::reduce), 3);
  EXPECT_EQ(count(each, Kind::reduce), 3 * 4);
  for (const auto& row : once.rows) {
    const auto at = std::find_if(row.begin(), row.end(), [](const Action& a) { return a.kind == Kind::reduce; });
    EXPECT_EQ((at - 1)->kind, Kind::weight_gradient);
    EXPECT_EQ((at - 1)->microbatch, 3);
  }
  // The update waits for it; with several chunks, the reduction of one hides behind the computation of the other.
  const StageCosts costs{.reduce = 5};
  EXPECT_EQ(simulate(add_reductions(one_f_one_b({.ranks = 1, .microbatches = 2}), Reduce::once), costs).makespan, 6 + 5);
  EXPECT_EQ(simulate(add_reductions(gpipe({.ranks = 1, .microbatches = 4, .chunks = 2}), Reduce::once), costs).makespan,
            24 + 5);
}

TEST(Lowering, TiedWeightsAreSummedByAllThatHaveThemBeforeTheUpdate) {
  const Schedule table = add_ties(one_f_one_b({.ranks = 3, .microbatches = 4}), {{0, 2}});
  EXPECT_EQ(count(table, Kind::tie), 2);
  EXPECT_FALSE(find_problem(table));
  // The sum starts when the last of them is ready: rank 0, which has the last backward.
  const double without = simulate(one_f_one_b({.ranks = 3, .microbatches = 4})).makespan;
  EXPECT_EQ(simulate(table, StageCosts{.tie = 5}).makespan, without + 5);
}

TEST(Lowering, EvaluationIsTheForwardsAlone) {
  for (const Schedule& table : tables()) {
    const Schedule forwards =
        lower(forwards_only(table), {.sharded_parameters = true, .reductions = true, .tied = {{0, 1}}});
    EXPECT_FALSE(find_problem(forwards));
    EXPECT_EQ(count(forwards, Kind::forward), table.stages * table.microbatches);
    EXPECT_EQ(count(forwards, Kind::backward) + count(forwards, Kind::update) + count(forwards, Kind::reduce), 0);
    EXPECT_EQ(peak_activations(forwards), std::vector<int>(4, 0));
  }
}

}  // namespace
}  // namespace bonfire::schedule::lowering_test
