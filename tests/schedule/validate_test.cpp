#include "bonfire/schedule/validate.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <map>
#include <random>
#include <set>

#include "bonfire/schedule/generate.h"
#include "bonfire/schedule/lowering.h"
#include "bonfire/schedule/text.h"

namespace bonfire::schedule::validate_test {
namespace {

std::vector<Schedule> complete_tables() {
  std::vector<Schedule> tables;
  for (const auto& name : schedule_names()) {
    const Schedule schedule = generate(name, {.ranks = 3, .microbatches = 6, .chunks = natural_chunks(name)});
    tables.push_back(lower(schedule, {.sharded_parameters = true, .reductions = true, .tied = {{0, schedule.stages - 1}}}));
  }
  return tables;
}

TEST(Validate, NoCellCanBeMissingOrComeTwice) {
  for (const Schedule& table : complete_tables()) {
    ASSERT_FALSE(find_problem(table));
    for (std::size_t rank = 0; rank < table.rows.size(); ++rank) {
      for (std::size_t at = 0; at < table.rows[rank].size(); ++at) {
        Schedule without = table;
        without.rows[rank].erase(without.rows[rank].begin() + static_cast<std::ptrdiff_t>(at));
        EXPECT_TRUE(find_problem(without)) << "without " << to_text(table.rows[rank][at]);
        Schedule twice = table;
        twice.rows[rank].insert(twice.rows[rank].begin() + static_cast<std::ptrdiff_t>(at), table.rows[rank][at]);
        EXPECT_TRUE(find_problem(twice)) << "twice " << to_text(table.rows[rank][at]);
      }
    }
  }
}

// Runs a table as ranks with blocking computations and links with queues would, one action at a time, and says whether all
// of it comes to an end. Knows computations, messages and updates. Shares nothing with the validator.
bool runs_to_the_end(const Schedule& table) {
  using Key = std::tuple<Kind, int, int>;
  std::map<std::pair<int, int>, int> home;  // of a stage's microbatch
  for (int rank = 0; rank < table.ranks(); ++rank) {
    for (const Action& action : table.rows[rank]) {
      if (action.kind == Kind::forward) home[{action.stage, action.microbatch}] = rank;
    }
  }
  std::set<Key> computed, delivered;
  std::map<std::pair<int, int>, std::deque<Key>> sends, receives;  // per direction, by what is carried
  std::vector<std::size_t> next(table.rows.size());
  std::vector<std::map<int, int>> backwards(table.rows.size());
  const auto here = [&](int rank, int stage, int i) { return home.at({stage, i}) == rank; };
  // What a computation reads is there: made on this rank, or received by it.
  const auto has = [&](int rank, Kind made, int stage, int i) {
    return here(rank, stage, i) ? computed.contains({made, stage, i}) : delivered.contains({made, stage, i});
  };
  const auto step = [&](int rank) {
    const Action a = table.rows[rank][next[rank]];
    const int i = a.microbatch;
    switch (a.kind) {
      case Kind::forward:
        if (a.stage > 0 && !has(rank, Kind::forward, a.stage - 1, i)) return false;
        computed.insert({Kind::forward, a.stage, i});
        return true;
      case Kind::backward:
      case Kind::input_gradient:
        if (!computed.contains({Kind::forward, a.stage, i})) return false;
        if (a.stage + 1 < table.stages && !has(rank, Kind::backward, a.stage + 1, i)) return false;
        computed.insert({Kind::backward, a.stage, i});
        if (a.kind == Kind::backward) ++backwards[rank][a.stage];
        return true;
      case Kind::weight_gradient:
        if (!computed.contains({Kind::backward, a.stage, i})) return false;
        ++backwards[rank][a.stage];
        return true;
      case Kind::update: return backwards[rank][a.stage] == table.microbatches;
      case Kind::send_forward:
        if (!computed.contains({Kind::forward, a.stage, i})) return false;
        sends[{rank, home.at({a.stage + 1, i})}].push_back({Kind::forward, a.stage, i});
        return true;
      case Kind::send_backward:
        if (!computed.contains({Kind::backward, a.stage, i})) return false;
        sends[{rank, home.at({a.stage - 1, i})}].push_back({Kind::backward, a.stage, i});
        return true;
      case Kind::receive_forward:
        receives[{home.at({a.stage - 1, i}), rank}].push_back({Kind::forward, a.stage - 1, i});
        return true;
      case Kind::receive_backward:
        receives[{home.at({a.stage + 1, i}), rank}].push_back({Kind::backward, a.stage + 1, i});
        return true;
      default: return false;
    }
  };
  for (bool moved = true; moved;) {
    moved = false;
    for (int rank = 0; rank < table.ranks(); ++rank) {
      while (next[rank] < table.rows[rank].size() && step(rank)) {
        ++next[rank];
        moved = true;
      }
    }
    for (auto& [direction, queue] : receives) {
      auto& sent = sends[direction];
      while (!queue.empty() && !sent.empty()) {
        if (queue.front() != sent.front()) return false;  // the wrong tensor would arrive
        delivered.insert(queue.front());
        queue.pop_front();
        sent.pop_front();
        moved = true;
      }
    }
  }
  for (int rank = 0; rank < table.ranks(); ++rank) {
    if (next[rank] < table.rows[rank].size()) return false;
  }
  return true;
}

// Two cells of a row change places: sometimes the table can still run, mostly it cannot.
TEST(Validate, AgreesWithAnExecutionAboutEveryChangeOfOrder) {
  std::mt19937 random(5);
  int good = 0, bad = 0;
  for (const auto& name : schedule_names()) {
    const Schedule table = lower(generate(name, {.ranks = 3, .microbatches = 3, .chunks = natural_chunks(name)}));
    ASSERT_TRUE(runs_to_the_end(table)) << name;
    for (int round = 0; round < 400; ++round) {
      Schedule changed = table;
      for (unsigned swaps = 1 + random() % 2; swaps > 0; --swaps) {
        auto& row = changed.rows[random() % changed.rows.size()];
        const std::size_t a = random() % row.size(), b = std::min(row.size() - 1, a + 1 + random() % 4);
        std::swap(row[a], row[b]);
      }
      const auto problem = find_problem(changed);
      ASSERT_EQ(!problem, runs_to_the_end(changed)) << (problem ? problem->message : "no problem") << '\n'
                                                    << table_text(changed);
      ++(problem ? bad : good);
    }
  }
  EXPECT_GT(good, 100);
  EXPECT_GT(bad, 100);
}

struct Case {
  std::string table;
  std::string message;  // part of it
  Position cell;
};

TEST(Validate, NamesTheCell) {
  const std::vector<Case> cases = {
      {"0F0 0SF0 0RB0 0B0 0F1 0RB1 0B1\n1RF0 1F0 1B0 1SB0 1RF1 1F1 1B1 1SB1",
       "rank 0, cell 4, '0F1': the send '0SF1' is missing: '1F1' on rank 1 needs it",
       {0, 4}},
      {"0F0 0SF0 0RB0 0B0\n1RF0 1F0 1B0",
       "rank 1, cell 2, '1B0': the send '1SB0' is missing: '0B0' on rank 0 needs it",
       {1, 2}},
      {"0F0 0SF0 0RB0 0B0\n1F0 1B0 1SB0", "rank 1, cell 0, '1F0': the receive '1RF0' is missing", {1, 0}},
      {"0F0 0SF0 0B0 0RB0\n1RF0 1F0 1B0 1SB0", "'0B0': it needs '0RB0', which is received later, in cell 3", {0, 2}},
      {"0SF0 0F0 0RB0 0B0\n1RF0 1F0 1B0 1SB0", "'0SF0': it sends what '0F0' makes later", {0, 0}},
      {"0F0 0SF0 0F1 0SF1\n1RF1 1RF0 1F0 1F1",
       "'1RF0': rank 0 sends '0SF0' before '0SF1', but here it is received after",
       {1, 1}},
      {"0F0 0SF0 0SB0\n1RF0 1F0", "there is no stage -1 at the other end", {0, 2}},
      {"0F0 1F0 0SF0 1B0 0B0", "both ends are on rank 0", {0, 2}},
      {"0F0 1RF0\n0SF0 1F0", "it belongs to rank 1", {0, 1}},
      {"0F0 0B0\n1F0", "its backward '1B0' is missing", {1, 0}},
      {"0F0 0I0\n1F0 1B0", "'0I0': '0W0' is missing", {0, 1}},
      {"0F0 0B0 0W0\n1F0 1B0", "the backward is already whole in '0B0'", {0, 2}},
      {"0F0 0F0 0B0", "it comes a second time; the first is on rank 0, cell 0", {0, 1}},
      {"0F0 0F2 0B0 0B2", "'0F1' is missing", {0, 0}},
      {"0F0 0F1 0B0 0B1\n1F0 1B0", "'1F1' is missing: the table has 2 stages and 2 microbatches", {1, 0}},
      {"0F0\n0B0 1F0 1B0", "its activation is on rank 0", {1, 0}},
      {"0B0 0F0", "it needs '0F0', which comes later, in cell 1", {0, 0}},
      {"0F0 0B0 0U\n1F0 1B0", "the update '1U' is missing", {1, 1}},
      {"0F0 0U 0B0", "it comes after the stage's update '0U'", {0, 2}},
      {"0F0 0B0 0U 0U", "updated a second time", {0, 3}},
      {"0F0 0B0 0U 1U\n1F0 1B0 1U", "rank 0 has not computed stage 1", {0, 3}},
      {"0UNSHARD 0F0 0RESHARD 0B0", "stage 0 is not gathered: '0UNSHARD' must come before", {0, 3}},
      {"0UNSHARD 0UNSHARD 0F0 0B0 0RESHARD", "gathered already, since cell 0", {0, 1}},
      {"0UNSHARD 0F0 0B0", "'0RESHARD' is missing", {0, 0}},
      {"0UNSHARD 0F0 0B0 0RESHARD 0RESHARD", "stage 0 is not gathered", {0, 4}},
      {"0F0 0REDUCE 0B0 0REDUCE 0U", "has no gradients to reduce", {0, 1}},
      {"0F0 0B0 0U 0REDUCE", "the gradient of '0B0' is not reduced: '0REDUCE' must come between", {0, 2}},
      {"0F0 0F1 0B0 0REDUCE 0B1", "its gradient is never reduced", {0, 4}},
      // Two ranks share stage 0, each with microbatches of its own.
      {"0F0 0B0 0REDUCE 0U\n0F1 0F2 0B1 0REDUCE 0B2 0REDUCE 0U",
       "rank 1 reduces stage 0 2 times and rank 0 1 times",
       {1, 6}},
      {"0F0 0B0 0TIE0 0U\n1F0 1B0 1U", "no other stage has a TIE0", {0, 2}},
      {"0F0 0B0 0U 0TIE0\n1F0 1B0 1TIE0 1U", "after the update of stage 0", {0, 3}},
      {"0F0 0F1 0B0 0TIE0 0B1 0U\n1F0 1F1 1B0 1B1 1TIE0 1U",
       "it adds to a gradient that '0TIE0' has summed already",
       {0, 4}},
      {"0F0 0B0 0TIE0 0TIE0 0U\n1F0 1B0 1TIE0 1U", "stage 1 has 1 of TIE0 and stage 0 has 2", {1, 2}},
  };
  for (const Case& wrong : cases) {
    const auto problem = find_problem(parse_table(wrong.table, "t"));
    ASSERT_TRUE(problem) << wrong.table;
    EXPECT_NE(problem->message.find(wrong.message), std::string::npos) << problem->message << "\nfor\n" << wrong.table;
    EXPECT_EQ(problem->cell, wrong.cell) << problem->message;
    EXPECT_EQ(problem->message.find('\n'), std::string::npos);
  }
}

// A rank sums a group once, with all that its stages have by then.
TEST(Validate, TiesOfTwoStagesOfOneRankComeAfterTheBackwardsOfBoth) {
  EXPECT_FALSE(find_problem(parse_table("0F0 1F0 1B0 0B0 1TIE0 1U 0TIE0 0U", "t")));
  const auto problem = find_problem(parse_table("0F0 1F0 1B0 1TIE0 1U 0B0 0TIE0 0U", "t"));
  ASSERT_TRUE(problem);
  EXPECT_NE(problem->message.find("it adds to a gradient that '1TIE0' has summed already"), std::string::npos)
      << problem->message;
  EXPECT_EQ(problem->cell, (Position{0, 5}));
}

// What a table may have depends on who runs it.
TEST(Validate, LimitsOfWhoRunsIt) {
  using Groups = std::vector<std::vector<int>>;
  struct Case {
    const char* table;
    Limits limits;
    const char* message;
    Position cell;
  };
  const std::vector<Case> cases{
      {"0F0 0F1 0B0 0REDUCE 0B1 0REDUCE 0U",
       {.reduces_once = true},
       "the gradient of '0B1', in cell 4, is yet to come, and gradients are kept whole",
       {0, 3}},
      {"0F0 0F1 0I0 0W0 0REDUCE 0I1 0W1 0REDUCE 0U", {.reduces_once = true}, "the gradient of '0W1', in cell 6,", {0, 4}},
      {"0F0 0B0\n0F1 0B1",
       {.one_rank_per_stage = true},
       "stage 0 is on rank 0 for microbatch 0; allowed: one rank for all microbatches of a stage",
       {1, 0}},
      {"0F0 0B0 0TIE0 0U\n1F0 1B0 1TIE0 1U",
       {.tied = Groups{}},
       "no weights of the model are tied over several stages",
       {0, 2}},
      {"0F0 0B0 0TIE1 0U\n1F0 1B0 1TIE1 1U",
       {.tied = Groups{{0, 1}}},
       "the last group of stages with tied weights is TIE0",
       {0, 2}},
      {"0F0 0B0 0TIE0 0U\n1F0 1B0 1TIE0 1U\n2F0 2B0 2U",
       {.tied = Groups{{0, 2}}},
       "stage 1 has no weights of group 0; the group's stages are 0, 2",
       {1, 2}},
      {"0F0 0B0 0TIE0 0U\n1F0 1B0 1TIE0 1U\n2F0 2B0 2U",
       {.tied = Groups{{0, 1, 2}}},
       "'2TIE0' must come before: stages 0, 1, 2 share weights",
       {2, 2}},
      {"0F0 0B0 0U\n1F0 1B0 1U", {.tied = Groups{{0, 1}}}, "'0TIE0' must come before: stages 0, 1 share weights", {0, 2}},
  };
  for (const Case& wrong : cases) {
    const auto table = parse_table(wrong.table, "t");
    EXPECT_FALSE(find_problem(table)) << wrong.table;
    const auto problem = find_problem(table, wrong.limits);
    ASSERT_TRUE(problem) << wrong.table;
    EXPECT_NE(problem->message.find(wrong.message), std::string::npos) << problem->message << "\nfor\n" << wrong.table;
    EXPECT_EQ(problem->cell, wrong.cell) << problem->message;
  }
  EXPECT_FALSE(find_problem(parse_table("0F0 0F1 0B0 0B1 0REDUCE 0U", "t"), {.reduces_once = true, .tied = Groups{}}));
}

TEST(Validate, ADeadlockShowsWhoWaitsForWhom) {
  // Each rank wants the other's result of the microbatch that the other does second.
  const Schedule table = parse_table("0F0 0B0 0F1 0B1\n1F1 1B1 1F0 1B0", "t");
  const auto problem = find_problem(table);
  ASSERT_TRUE(problem);
  EXPECT_EQ(
      problem->message,
      "rank 0, cell 1, '0B0': it waits for '1B0' of rank 1, which waits for '1F1' of rank 1, which waits for '0F1' of rank "
      "0, which waits for it: a deadlock");
  EXPECT_TRUE(find_problem(lower(table)));
}

TEST(Validate, TheErrorIsOneLineAndHasTheTable) {
  const Schedule table = parse_table("0F0 0SF0 0RB0 0B0\n1RF0 1F0 1B0", "t");
  try {
    validate(table, "mine.txt");
    FAIL() << "a table without a send is valid";
  } catch (const ScheduleError& error) {
    EXPECT_EQ(std::string(error.what()),
              "schedule mine.txt: rank 1, cell 2, '1B0': the send '1SB0' is missing: '0B0' on rank 0 needs it");
    EXPECT_EQ(error.table(),
              "rank 0: 0F0  0SF0 0RB0  0B0\n"
              "rank 1: 1RF0 1F0  [1B0]\n");
  }
}

TEST(Validate, ActivationsStayWithinTheirBound) {
  for (const auto& name : schedule_names()) {
    const Schedule table = generate(name, {.ranks = 4, .microbatches = 8, .chunks = natural_chunks(name)});
    auto bounds = peak_activations(table);
    EXPECT_FALSE(find_problem(table, {.activations = bounds})) << name;
    for (auto& bound : bounds) {
      --bound;
      const auto problem = find_problem(table, {.activations = bounds});
      ASSERT_TRUE(problem) << name;
      EXPECT_EQ(table.at(problem->cell).kind, Kind::forward);
      EXPECT_NE(problem->message.find("activations are live"), std::string::npos) << problem->message;
      ++bound;
    }
  }
}

TEST(Validate, AnEmptyTableIsAProblem) {
  EXPECT_TRUE(find_problem({}));
  EXPECT_TRUE(find_problem({.stages = 1, .microbatches = 1, .rows = {{}}}));
  EXPECT_TRUE(find_problem({.stages = 1, .microbatches = 1, .rows = {{{5, Kind::forward, 0}}}}));
}

}  // namespace
}  // namespace bonfire::schedule::validate_test
