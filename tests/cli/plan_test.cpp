#include <gtest/gtest.h>

#include <algorithm>

#include <nlohmann/json.hpp>

#include "tests/cli/command.h"

namespace bonfire {
namespace {

constexpr const char* small =
    "[model]\ntype = \"llama\"\ndim = 64\nlayers = 2\nheads = 4\nffn = 128\nvocab = 256\n[data]\nsequence = 32\n";

TEST(PlanMemory, HasTheTablesPeopleKnow) {
  const testing::Scratch scratch;
  scratch.write("a.toml", small);
  const auto ended = scratch.bonfire("plan a.toml --memory --gpus 8 --cap 80 --json");
  ASSERT_EQ(ended.code, 0) << ended.err;
  const auto json = nlohmann::json::parse(ended.out);
  EXPECT_EQ(json.at("ranks"), 8);
  EXPECT_GT(json.at("memory_bytes"), json.at("memory").at("activations"));
  int given = 0;
  for (const auto& row : json.at("table")) {
    given += row.at("file").get<bool>();
    if (row.at("precision") != "mixed") continue;
    const double shard = row.at("shard"), bytes = row.at("bytes_per_parameter").at("total");
    if (row.at("sharded") == "optimizer") {
      EXPECT_DOUBLE_EQ(bytes, 4 + 12 / shard);
    }
    if (row.at("sharded") == "gradients") {
      EXPECT_DOUBLE_EQ(bytes, 2 + 14 / shard);
    }
    if (row.at("sharded") == "parameters") {
      EXPECT_DOUBLE_EQ(bytes, 16 / shard);
    }
    EXPECT_GE(row.at("state_bytes").get<double>(), bytes * json.at("parameters").get<double>());
  }
  EXPECT_EQ(given, 1);
  ASSERT_EQ(json.at("fits").size(), 3u);
  EXPECT_EQ(json.at("fits")[0].at("shard"), 1);
}

TEST(PlanMemory, IsReadableAndMarksTheFile) {
  const testing::Scratch scratch;
  scratch.write("a.toml", small);
  const auto ended = scratch.bonfire("plan a.toml --memory");
  ASSERT_EQ(ended.code, 0) << ended.err;
  for (const char* words : {"24 in all", "<- the file", "ZeRO-3", "mixed, fp32 gradients"}) {
    // One rank has nothing to shard.
    EXPECT_EQ(ended.out.find(words) != std::string::npos, std::string(words) != "ZeRO-3") << words << "\n" << ended.out;
  }
}

TEST(PlanMemory, BadRequestsAreOneLine) {
  const testing::Scratch scratch;
  scratch.write("a.toml", small);
  for (const char* arguments :
       {"plan a.toml", "plan a.toml --memory --gpus 0", "plan a.toml --memory --cap -1", "plan b.toml --memory"}) {
    const auto ended = scratch.bonfire(arguments);
    EXPECT_EQ(ended.code, 2) << arguments;
    EXPECT_EQ(std::count(ended.err.begin(), ended.err.end(), '\n'), 1) << ended.err;
    EXPECT_EQ(ended.out, "");
  }
}

}  // namespace
}  // namespace bonfire
