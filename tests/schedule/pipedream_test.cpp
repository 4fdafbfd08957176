#include "bonfire/schedule/pipedream.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <sstream>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "bonfire/base/error.h"
#include "bonfire/schedule/text.h"
#include "bonfire/schedule/timeline.h"
#include "bonfire/schedule/validate.h"
#include "tests/support/thrown.h"

namespace bonfire::schedule::pipedream_test {
namespace {

constexpr auto modes = {WeightMode::stashing, WeightMode::vertical, WeightMode::two_buffers, WeightMode::flush};

std::string words(const RoundRobin& robin) {
  return fmt::format("{} {}, {} minibatches of {}", name_of(robin.mode), fmt::join(robin.replicas, "-"), robin.minibatches,
                     robin.microbatches);
}

int round_of(const std::vector<int>& replicas) {
  return std::accumulate(replicas.begin(), replicas.end(), 1, [](int a, int b) { return std::lcm(a, b); });
}

// Replicas that divide each other and those that do not, in both directions.
std::vector<std::vector<int>> all_replicas() {
  std::vector<std::vector<int>> all;
  for (int a = 1; a <= 4; ++a) {
    all.push_back({a});
    for (int b = 1; b <= 4; ++b) {
      all.push_back({a, b});
      for (int c = 1; c <= 4; ++c) all.push_back({a, b, c});
    }
  }
  for (auto more : {std::vector{1, 1, 1, 1}, {15, 1}, {7, 1}, {1, 7}, {14, 1, 1}, {8, 5, 3}, {1, 5, 1, 2}})
    all.push_back(more);
  return all;
}

// Two buffers need minibatches that are longer than what is on its way.
std::vector<RoundRobin> all_shapes() {
  std::vector<RoundRobin> shapes;
  for (const auto mode : modes)
    for (const auto& replicas : all_replicas()) {
      const int round = round_of(replicas);
      RoundRobin robin{.replicas = replicas, .mode = mode, .minibatches = 3, .microbatches = round};
      if (mode == WeightMode::flush) {
        shapes.push_back(robin);
      } else if (mode == WeightMode::two_buffers) {
        while (robin.microbatches < robin.ranks() + *std::max_element(replicas.begin(), replicas.end()))
          robin.microbatches += round;
        shapes.push_back(robin);
      } else {
        for (const int rounds : {1, 3})
          for (const int microbatches : {1, 2, 3}) {
            robin.minibatches = rounds * round;
            robin.microbatches = microbatches;
            shapes.push_back(robin);
          }
      }
    }
  return shapes;
}

int versions_of_the_page(const RoundRobin& robin, std::size_t stage) {
  const auto admitted = [&](std::size_t at) {
    const int ranks = std::accumulate(robin.replicas.begin() + static_cast<std::ptrdiff_t>(at), robin.replicas.end(), 0);
    return (ranks + robin.replicas[at] - 1) / robin.replicas[at];
  };
  const int first = robin.replicas[0], own = robin.replicas[stage];
  switch (robin.mode) {
    case WeightMode::stashing: return admitted(stage);
    case WeightMode::vertical: return 1 + (admitted(0) * first - std::gcd(first, own) + own - 1) / own;
    case WeightMode::two_buffers: return 2;
    case WeightMode::flush: break;
  }
  return 1;
}

Schedule lowered(const RoundRobin& robin) { return lower(pipedream(robin), {.reductions = true}); }

TEST(PipeDream, EveryTablePassesTheValidator) {
  for (const auto& robin : all_shapes()) {
    SCOPED_TRACE(words(robin));
    const Limits limits{.many_updates = true};
    const Schedule table = pipedream(robin);
    EXPECT_EQ(table.ranks(), robin.ranks());
    EXPECT_NO_THROW(validate(table, "plain", limits));
    EXPECT_NO_THROW(validate(lowered(robin), "lowered", limits));
  }
}

// The update that has been made when a minibatch's forward runs, if the pipeline is full: counted here from the published
// equations, for stages i = 1 to n without replicas at update t.
TEST(PipeDream, WithoutReplicasVersionsArePublished) {
  for (const int n : {1, 2, 3, 4, 7})
    for (const auto mode : modes) {
      RoundRobin robin{.replicas = std::vector<int>(static_cast<std::size_t>(n), 1), .mode = mode, .minibatches = 12};
      if (mode == WeightMode::two_buffers || mode == WeightMode::flush) robin.microbatches = n;
      SCOPED_TRACE(words(robin));
      const Schedule table = lowered(robin);
      const auto versions = versions_of(table, mode, "test");
      for (int i = 1; i <= n; ++i) {
        const auto& row = table.rows[static_cast<std::size_t>(i - 1)];
        for (std::size_t cell = 0; cell < row.size(); ++cell) {
          if (row[cell].kind != Kind::forward && row[cell].kind != Kind::backward) continue;
          const int t = row[cell].microbatch / robin.microbatches;
          const int published = mode == WeightMode::stashing      ? t - n + i
                                : mode == WeightMode::vertical    ? t - n + 1
                                : mode == WeightMode::two_buffers ? t - 1
                                                                  : t;
          EXPECT_EQ(versions.of[static_cast<std::size_t>(i - 1)][cell], std::max(0, published)) << to_text(row[cell]);
        }
        const int held = mode == WeightMode::stashing      ? n - i + 1
                         : mode == WeightMode::vertical    ? n
                         : mode == WeightMode::two_buffers ? 2
                                                           : 1;
        EXPECT_EQ(versions.held[static_cast<std::size_t>(i - 1)], held) << "stage " << i;
      }
    }
}

// With replicas, as docs/pipedream.md has it: minibatch b belongs to round floor(b / r) of a stage with r replicas.
TEST(PipeDream, WithReplicasVersionsAreThoseOfThePage) {
  for (const auto& robin : all_shapes()) {
    SCOPED_TRACE(words(robin));
    const Schedule table = lowered(robin);
    const auto versions = versions_of(table, robin.mode, "test");
    const auto in_flight_at = [&](std::size_t stage) {
      int ranks = 0;
      for (std::size_t later = stage; later < robin.replicas.size(); ++later) ranks += robin.replicas[later];
      int count = 0;
      while (count * robin.replicas[stage] < ranks) ++count;
      return count;
    };
    for (std::size_t rank = 0; rank < table.rows.size(); ++rank)
      for (std::size_t cell = 0; cell < table.rows[rank].size(); ++cell) {
        const Action& action = table.rows[rank][cell];
        if (action.kind != Kind::forward && action.kind != Kind::backward) continue;
        const auto stage = static_cast<std::size_t>(action.stage);
        const int b = action.microbatch / robin.microbatches, r = robin.replicas[stage], first = robin.replicas[0];
        const auto newest = [&](std::size_t at) { return std::max(0, b / robin.replicas[at] - in_flight_at(at) + 1); };
        const int expected = robin.mode == WeightMode::stashing      ? newest(stage)
                             : robin.mode == WeightMode::vertical    ? newest(0) * first / r
                             : robin.mode == WeightMode::two_buffers ? std::max(0, b - 1)
                                                                     : b;
        EXPECT_EQ(versions.of[rank][cell], expected) << "rank " << rank << ", " << to_text(action);
        EXPECT_EQ(version_of(robin, action.stage, action.microbatch), expected)
            << "rank " << rank << ", " << to_text(action);
        EXPECT_LE(versions.held[rank], versions_of_the_page(robin, stage));
      }
  }
}

// A full pipeline needs as many versions as the page derives, and no fewer.
TEST(PipeDream, VersionsHeldAreThoseOfThePage) {
  for (const auto mode : modes)
    for (const auto& replicas : all_replicas()) {
      RoundRobin robin{.replicas = replicas, .mode = mode};
      const int ranks = robin.ranks(), round = round_of(replicas);
      if (mode == WeightMode::stashing || mode == WeightMode::vertical) {
        // Longer than the pipeline takes to fill, and another round.
        robin.minibatches = ((2 * ranks + 2 * *std::max_element(replicas.begin(), replicas.end())) / round + 2) * round;
      } else {
        robin.minibatches = 3;
        robin.microbatches = (2 * ranks / round + 1) * round;
      }
      SCOPED_TRACE(words(robin));
      const auto held = versions_of(pipedream(robin), mode, "test").held;
      for (std::size_t stage = 0; stage < replicas.size(); ++stage) {
        const auto first = held.begin() + robin.first_rank(static_cast<int>(stage));
        const int most = *std::max_element(first, first + replicas[stage]);
        // Of two buffers the second is not needed where no minibatch begins before the one before it has ended.
        if (mode == WeightMode::two_buffers) {
          EXPECT_LE(most, 2) << "stage " << stage;
        } else {
          EXPECT_EQ(most, versions_of_the_page(robin, stage)) << "stage " << stage;
        }
        EXPECT_EQ(most_versions(robin, static_cast<int>(stage)), versions_of_the_page(robin, stage)) << "stage " << stage;
      }
    }
}

// A table's rank has stage and replica by the minibatch's number.
TEST(PipeDream, ReplicasTakeMinibatchesInTurn) {
  for (const auto& robin : all_shapes()) {
    SCOPED_TRACE(words(robin));
    const Schedule table = pipedream(robin);
    for (std::int32_t rank = 0; rank < table.ranks(); ++rank)
      for (const Action& action : table.rows[static_cast<std::size_t>(rank)])
        if (action.kind != Kind::update) {
          EXPECT_EQ(robin.rank_of(action.stage, action.microbatch), rank);
        }
  }
}

TEST(PipeDream, AsManyMinibatchesAreAdmittedAsPublished) {
  for (const auto& replicas : all_replicas()) {
    const RoundRobin robin{.replicas = replicas, .minibatches = 4 * round_of(replicas) * 4};
    const int ranks = robin.ranks(), first = replicas.front();
    EXPECT_EQ(in_flight(robin, 0), (ranks + first - 1) / first);
    const auto live = peak_activations(pipedream(robin));
    for (int stage = 0; stage < static_cast<int>(replicas.size()); ++stage)
      for (int replica = 0; replica < replicas[static_cast<std::size_t>(stage)]; ++replica)
        EXPECT_LE(live[static_cast<std::size_t>(robin.first_rank(stage) + replica)], in_flight(robin, stage));
    EXPECT_EQ(live[0], std::min(in_flight(robin, 0), robin.minibatches / first));
  }
}

// A stage with r replicas that takes r times as long as others: per minibatch, every stage takes 3.
double seconds_of_minibatch(RoundRobin robin) {
  Costs costs;
  costs.action = [&](const Action& action) {
    const double scale = robin.replicas[static_cast<std::size_t>(action.stage)];
    return action.kind == Kind::forward ? scale : action.kind == Kind::backward ? 2 * scale : 0;
  };
  const int round = round_of(robin.replicas);
  robin.minibatches = 8 * round;
  const double shorter = simulate(lowered(robin), costs).makespan;
  robin.minibatches = 12 * round;
  return (simulate(lowered(robin), costs).makespan - shorter) / (4 * round);
}

// With as many replicas on all stages, or replicas only of the first one and others behind it, no rank waits for anything
// but the slowest stage.
TEST(PipeDream, AFullPipelineIsAsFastAsItsSlowestStage) {
  for (const auto mode : {WeightMode::stashing, WeightMode::vertical}) {
    for (const auto& replicas : std::vector<std::vector<int>>{
             {1}, {4}, {1, 1}, {1, 1, 1, 1}, {3, 3, 3}, {2, 1}, {3, 1}, {7, 1}, {15, 1}, {2, 2, 2, 2}})
      EXPECT_DOUBLE_EQ(seconds_of_minibatch({.replicas = replicas, .mode = mode}), 3) << fmt::format("{}", replicas);
    // Otherwise the replicas of a stage wait for each other in their updates, since no more minibatches are admitted than
    // published. The page has these.
    EXPECT_DOUBLE_EQ(seconds_of_minibatch({.replicas = {1, 2}, .mode = mode}), 3.75);
    EXPECT_DOUBLE_EQ(seconds_of_minibatch({.replicas = {2, 1, 1}, .mode = mode}), 4.5);
    EXPECT_DOUBLE_EQ(seconds_of_minibatch({.replicas = {3, 2}, .mode = mode}), 3.5);
    EXPECT_DOUBLE_EQ(seconds_of_minibatch({.replicas = {14, 1, 1}, .mode = mode}), 45.0 / 14);
  }
}

TEST(PipeDream, AnEndlessTableIsAPrologueAPeriodAndAnEpilogue) {
  for (const auto& shape : all_shapes()) {
    if (shape.ranks() > 10) continue;
    SCOPED_TRACE(words(shape));
    const LowerOptions options{.reductions = true};
    const Endless table = endless(shape, options);
    for (const int periods : {1, 2, 5}) {
      RoundRobin robin = shape;
      robin.minibatches = table.least_minibatches + (periods - 1) * table.period_minibatches;
      EXPECT_EQ(unrolled(table, periods), lower(pipedream(robin), options));
      // What is left out at the beginning leaves the rest as it is.
      for (int rank = 0; rank < robin.ranks(); ++rank)
        for (int skipped = 0; skipped <= periods; ++skipped) {
          const auto whole = unrolled_row(table, rank, {.count = periods});
          const auto rest = unrolled_row(table, rank, {.count = periods, .skipped = skipped});
          EXPECT_TRUE(std::equal(rest.rbegin(), rest.rend(), whole.rbegin()));
        }
    }
  }
}

// How often a stage has been updated between a forward and what comes of it.
TEST(PipeDream, StalenessIsWhatVersionsSay) {
  const RoundRobin robin{.replicas = {1, 1, 1}, .minibatches = 6};
  const Schedule table = pipedream(robin);
  EXPECT_EQ(staleness_of(table, versions_of(table, WeightMode::stashing, "test")),
            (std::vector<std::vector<int>>{{0, 1, 2, 2, 2, 2}, {0, 1, 1, 1, 1, 1}, {0, 0, 0, 0, 0, 0}}));
  EXPECT_EQ(staleness_of(table, versions_of(table, WeightMode::vertical, "test")),
            (std::vector<std::vector<int>>{{0, 1, 2, 2, 2, 2}, {0, 1, 2, 2, 2, 2}, {0, 1, 2, 2, 2, 2}}));
}

// tests/schedule/pipedream/NAME_REPLICAS_MINIBATCHESxMICROBATCHES.txt, such as pipedream_3-1_6x1.txt: as in
// generate_test.cpp, for a reader and against changes that nobody meant.
TEST(PipeDream, TablesAreAsExpected) {
  int files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(BONFIRE_SOURCE_DIR "/tests/schedule/pipedream")) {
    const std::string stem = entry.path().stem();
    SCOPED_TRACE(stem);
    const auto first = stem.find('_'), second = stem.rfind('_'), cross = stem.rfind('x');
    RoundRobin robin{.replicas = {}, .mode = weight_mode(stem.substr(0, first)).value()};
    std::istringstream replicas(stem.substr(first + 1, second - first - 1));
    for (std::string word; std::getline(replicas, word, '-');) robin.replicas.push_back(std::stoi(word));
    robin.minibatches = std::stoi(stem.substr(second + 1));
    robin.microbatches = std::stoi(stem.substr(cross + 1));
    std::ifstream file(entry.path());
    std::stringstream text;
    text << file.rdbuf();
    const Schedule table = pipedream(robin);
    EXPECT_EQ(table_text(table, simulate(table)), text.str());
    EXPECT_EQ(parse_table(text.str(), stem), table);
    ++files;
  }
  EXPECT_EQ(files, 6);
}

TEST(PipeDream, WhatCannotBeIsRefused) {
  const auto message = [](const RoundRobin& robin) {
    return testing::thrown<ConfigError>([&] { versions_of(lowered(robin), robin.mode, std::string(name_of(robin.mode))); });
  };
  testing::expect_part(message({.replicas = {2, 3}, .minibatches = 8}), "whole rounds of all stages, a multiple of 6");
  testing::expect_part(message({.replicas = {2, 3}, .mode = WeightMode::flush, .microbatches = 9}), "a multiple of 6");
  testing::expect_part(message({.replicas = {2, 0}}), "0 replicas; allowed: 1 or more");
  testing::expect_part(message({.replicas = {}}), "no stages");
  testing::expect_part(message({.replicas = {997, 991, 983}}), "come together only after");
  // Updates of two minibatches ago are still on their way.
  testing::expect_part(
      message({.replicas = {1, 1, 1, 1}, .mode = WeightMode::two_buffers, .minibatches = 6, .microbatches = 2}),
      "needs version 1 of its weights, and 0 updates came before; allowed: more microbatches");
}

}  // namespace
}  // namespace bonfire::schedule::pipedream_test
