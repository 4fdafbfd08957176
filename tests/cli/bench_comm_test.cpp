#include <gtest/gtest.h>

#include <algorithm>

#include <nlohmann/json.hpp>

#include "tests/cli/command.h"

namespace bonfire::bench_comm_test {
namespace {
using bonfire::testing::Scratch;

TEST(BenchComm, PrintsATableForEachCollective) {
  const Scratch scratch;
  const auto ended = scratch.bonfire(
      "bench comm all_reduce all_gather --ranks 2 --device cpu --from 64 --to 1024 --factor 4 --repeats 2 --json");
  ASSERT_EQ(ended.code, 0) << ended.err;
  const auto tables = nlohmann::json::parse(ended.out);
  ASSERT_EQ(tables.size(), 2u);
  for (const std::size_t at : {0, 1}) {
    const auto& table = tables[at];
    EXPECT_EQ(table.at("collective"), at == 0 ? "all_reduce" : "all_gather");
    EXPECT_EQ(table.at("ranks"), 2);
    EXPECT_EQ(table.at("dtype"), "fp32");
    ASSERT_EQ(table.at("rows").size(), 3u);
    std::int64_t bytes = 64;
    for (const auto& row : table.at("rows")) {
      EXPECT_EQ(row.at("bytes"), bytes);
      EXPECT_EQ(row.at("wrong"), 0);
      EXPECT_GT(row.at("seconds").get<double>(), 0);
      EXPECT_GT(row.at("bus_bytes_per_second").get<double>(), 0);
      bytes *= 4;
    }
  }
}

// As every command that starts ranks.
TEST(BenchComm, StartsAsManyRanksAsTheVariableSays) {
  const Scratch scratch;
  const auto ranks = [&](const std::string& variable, const std::string& option) {
    const auto ended = scratch.bonfire("bench comm --device cpu --from 64 --to 64 --repeats 1 --json " + option, variable);
    EXPECT_EQ(ended.code, 0) << ended.err;
    return nlohmann::json::parse(ended.out).at(0).at("ranks").get<int>();
  };
  EXPECT_EQ(ranks("BONFIRE_RANKS=3", ""), 3);
  EXPECT_EQ(ranks("BONFIRE_RANKS=3", "--ranks 2"), 2);
  EXPECT_EQ(ranks("BONFIRE_RANKS=", ""), 1);
}

TEST(BenchComm, PrintsWordsWithoutJson) {
  const Scratch scratch;
  const auto ended = scratch.bonfire("bench comm broadcast --ranks 2 --device cpu --from 64 --to 64 --repeats 1");
  ASSERT_EQ(ended.code, 0) << ended.err;
  for (const char* part : {"broadcast of fp32 over 2 ranks on cpu", "algbw", "busbw", "#wrong"})
    EXPECT_NE(ended.out.find(part), std::string::npos) << part << " is not in:\n" << ended.out;
}

TEST(BenchComm, BadRequestsAreOneLine) {
  const Scratch scratch;
  const auto refused = [&](const std::string& arguments, const std::string& words) {
    const auto ended = scratch.bonfire("bench comm " + arguments);
    EXPECT_EQ(ended.code, 2) << arguments;
    EXPECT_EQ(ended.out, "");
    EXPECT_NE(ended.err.find(words), std::string::npos) << ended.err;
    EXPECT_EQ(std::count(ended.err.begin(), ended.err.end(), '\n'), 1) << ended.err;
  };
  refused("all_reduse --ranks 2", "all_reduse");
  refused("all_reduce --ranks 2 --dtype fp8", "fp8");
  refused("all_reduce --ranks 2 --from 2048 --to 1024", "--to 1024 is smaller than --from 2048");
}

}  // namespace
}  // namespace bonfire::bench_comm_test
