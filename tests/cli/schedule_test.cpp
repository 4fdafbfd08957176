#include <gtest/gtest.h>

#include <algorithm>

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
  // People see where: the table is on stdout, with the cell in brackets.
  EXPECT_EQ(refused("no_send.txt", "rank 1, cell 2, '1B0': the send '1SB0' is missing"),
            "rank 0: 0F0  0SF0 0RB0  0B0\n"
            "rank 1: 1RF0 1F0  [1B0]\n");
  EXPECT_EQ(refused("no_send.txt --json", "the send '1SB0' is missing"), "");
}

}  // namespace
}  // namespace bonfire::schedule_test
