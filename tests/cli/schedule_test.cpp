#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "tests/cli/command.h"

namespace bonfire::schedule_test {
namespace {

TEST(ScheduleCommand, JsonHasTheNumbersAndTheTable) {
  const testing::Scratch scratch;
  const auto ended = scratch.bonfire("schedule 1f1b --ranks 4 --microbatches 8 --json");
  ASSERT_EQ(ended.code, 0) << ended.err;
  const auto json = nlohmann::json::parse(ended.out);
  EXPECT_EQ(json.at("makespan"), 33);
  EXPECT_DOUBLE_EQ(json.at("bubble"), 3.0 / 11);
  EXPECT_EQ(json.at("peak_activations"), nlohmann::json({4, 3, 2, 1}));
  ASSERT_EQ(json.at("table").size(), 4);
  EXPECT_EQ(json.at("table")[3][0], "3F0");
  EXPECT_EQ(json.at("table")[3].back(), "3U");
}

TEST(ScheduleCommand, WhatItPrintsItCanRead) {
  const testing::Scratch scratch;
  const auto first = scratch.bonfire("schedule zb-v --ranks 3 --microbatches 6 --messages");
  ASSERT_EQ(first.code, 0) << first.err;
  // The table stands between two empty lines.
  const auto begin = first.out.find("\n\n") + 2, end = first.out.find("\n\n", begin);
  scratch.write("mine.txt", first.out.substr(begin, end - begin));
  const auto second = scratch.bonfire("schedule mine.txt --ranks 3 --microbatches 6 --chunks 2");
  ASSERT_EQ(second.code, 0) << second.err;
  EXPECT_EQ(second.out.substr(second.out.find('\n')), first.out.substr(first.out.find('\n')));
}

TEST(ScheduleCommand, DrawsAPicture) {
  const testing::Scratch scratch;
  const auto ended = scratch.bonfire("schedule zb-v --ranks 4 --microbatches 8 --svg v.svg");
  ASSERT_EQ(ended.code, 0) << ended.err;
  EXPECT_EQ(scratch.read("v.svg").substr(0, 5), "<svg ");
}

// Three ranks take minibatches by turns for one that takes all.
TEST(ScheduleCommand, PipeDreamsTablesSayVersionsAndStaleness) {
  const testing::Scratch scratch;
  auto ended = scratch.bonfire("schedule pipedream --ranks 4 --replicas 3,1 --minibatches 9 --svg p.svg");
  ASSERT_EQ(ended.code, 0) << ended.err;
  for (const char* words :
       {"pipedream: 4 ranks, replicas 3,1, 9 minibatches of 1\n", "rank 3: ", "1F0", "1B8", "0U",
        "versions of the weights held by rank: 2 2 2 1\n", "staleness of updates by rank, at most: 1 1 1 0\n"})
    EXPECT_NE(ended.out.find(words), std::string::npos) << words << " is not in: " << ended.out;
  EXPECT_EQ(scratch.read("p.svg").substr(0, 5), "<svg ");

  ended = scratch.bonfire("schedule pipedream --ranks 4 --replicas 3,1 --minibatches 9 --json");
  ASSERT_EQ(ended.code, 0) << ended.err;
  const auto json = nlohmann::json::parse(ended.out);
  EXPECT_EQ(json.at("replicas"), nlohmann::json({3, 1}));
  EXPECT_EQ(json.at("minibatches"), 9);
  EXPECT_EQ(json.at("versions_held"), nlohmann::json({2, 2, 2, 1}));
  EXPECT_EQ(json.at("staleness"), nlohmann::json({{0, 1, 1}, {0, 1, 1}, {0, 1, 1}, {0, 0, 0, 0, 0, 0, 0, 0, 0}}));
  ASSERT_EQ(json.at("table").size(), 4u);
  for (int rank = 0; rank < 4; ++rank) {
    std::vector<std::string> forwards, expected;
    int updates = 0;
    const auto& row = json.at("table")[static_cast<std::size_t>(rank)];
    const auto& versions = json.at("versions")[static_cast<std::size_t>(rank)];
    ASSERT_EQ(versions.size(), row.size());
    for (std::size_t cell = 0; cell < row.size(); ++cell) {
      const auto text = row[cell].get<std::string>();
      if (text[1] == 'F') forwards.push_back(text);
      if (text.back() == 'U') {
        EXPECT_EQ(versions[cell], ++updates);
      }
    }
    for (int minibatch = rank < 3 ? rank : 0; minibatch < 9; minibatch += rank < 3 ? 3 : 1)
      expected.push_back((rank < 3 ? "0F" : "1F") + std::to_string(minibatch));
    EXPECT_EQ(forwards, expected) << "rank " << rank;
    EXPECT_EQ(updates, rank < 3 ? 3 : 9) << "rank " << rank;
  }
}

TEST(ScheduleCommand, BadRequestsAreOneLine) {
  const testing::Scratch scratch;
  scratch.write("no_send.txt", "0F0 0SF0 0RB0 0B0\n1RF0 1F0 1B0\n");
  scratch.write("letters.txt", "0F0 0Q0\n");
  scratch.write("good.txt", "0F0 0B0\n1F0 1B0\n");
  const auto refused = [&](const std::string& arguments, const std::string& words) {
    const auto ended = scratch.bonfire("schedule " + arguments);
    EXPECT_EQ(ended.code, 2) << arguments;
    EXPECT_NE(ended.err.find(words), std::string::npos) << ended.err;
    EXPECT_EQ(std::count(ended.err.begin(), ended.err.end(), '\n'), 1) << ended.err;
    return ended.out;
  };
  refused("interleaved --ranks 4 --microbatches 6",
          "6 microbatches on 4 ranks; allowed: a multiple of the ranks, such as 4 or 8");
  refused("2f2b --ranks 4 --microbatches 6",
          "'2f2b' is neither a built-in schedule nor a file; allowed: naive, gpipe, 1f1b, interleaved, zb-h1, zb-h2, zb-v, "
          "pipedream, pipedream-vertical, pipedream-2bw, pipedream-flush, or a file");
  refused("1f1b --microbatches 6", "--ranks is required");
  refused("1f1b --ranks four --microbatches 6", "four");
  refused("1f1b --ranks 4 --microbatches 6 --svg no/such/folder/a.svg", "no/such/folder/a.svg");
  refused("letters.txt", "letters.txt:1: '0Q0' is no action");
  refused("good.txt --ranks 3", "--ranks 3: the table in 'good.txt' has 2");
  refused("good.txt --microbatches 3", "--microbatches 3: the table in 'good.txt' has 1");
  refused("good.txt --chunks 2", "--chunks 2: the table in 'good.txt' has 2 stages on 2 ranks");
  refused("pipedream --ranks 5 --replicas 3,1", "--ranks 5: --replicas 3,1 are 4 together");
  refused("pipedream", "schedule pipedream: --ranks, or --replicas, is required");
  refused("pipedream --ranks 4 --chunks 2", "--chunks does not go with it");
  refused("pipedream --replicas 3,0", "0 replicas; allowed: 1 or more");
  refused("pipedream --replicas 2,3 --minibatches 8", "whole rounds of all stages, a multiple of 6");
  refused("pipedream-flush --replicas 2,3 --microbatches 8", "a multiple of 6");
  refused("1f1b --ranks 4 --microbatches 4 --replicas 3,1", "--replicas does not go with it");
  refused("gpipe --ranks 4 --microbatches 4 --minibatches 3", "--minibatches does not go with it");
  refused("pipedream-2bw --ranks 4 --microbatches 2 --json", "allowed: more microbatches in a minibatch");
  // People see where: the table is on stdout, with the cell in brackets.
  EXPECT_EQ(refused("no_send.txt", "rank 1, cell 2, '1B0': the send '1SB0' is missing"),
            "rank 0: 0F0  0SF0 0RB0  0B0\n"
            "rank 1: 1RF0 1F0  [1B0]\n");
  EXPECT_EQ(refused("no_send.txt --json", "the send '1SB0' is missing"), "");
}

}  // namespace
}  // namespace bonfire::schedule_test
