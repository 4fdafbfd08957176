#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <tuple>

#include <nlohmann/json.hpp>

#include "tests/cli/command.h"

namespace bonfire::plan_test {
namespace {

constexpr const char* small =
    "[model]\ntype = \"llama\"\ndim = 64\nlayers = 2\nheads = 4\nffn = 128\nvocab = 256\n[data]\nsequence = 32\n";

std::string single_spaced(const std::string& text) {
  std::string out;
  for (const char c : text)
    if (c != ' ' || (!out.empty() && out.back() != ' ')) out += c;
  return out;
}

TEST(PlanMemory, HasTheTablesPeopleKnow) {
  const testing::Scratch scratch;
  scratch.write("a.toml", small);
  const auto ended = scratch.bonfire("plan a.toml --memory --gpus 8 --cap 80 --json");
  ASSERT_EQ(ended.code, 0) << ended.err;
  const auto json = nlohmann::json::parse(ended.out);
  EXPECT_EQ(json.at("ranks"), 8);
  EXPECT_GT(json.at("memory_bytes"), json.at("memory").at("activations"));
  // Of each precision: what is left of gradients and of masters and state, and what parameters come to.
  struct Kind {
    double parameters, gradients, optimizer;
  };
  const std::map<std::string, Kind> kinds{{"fp32", {4, 4, 8}}, {"mixed", {2, 2, 12}}, {"mixed, fp32 gradients", {2, 4, 12}}};
  int given = 0;
  std::set<std::tuple<std::string, std::string, int>> rows;
  for (const auto& row : json.at("table")) {
    given += row.at("file").get<bool>();
    const int shard = row.at("shard");
    const std::string what = row.at("sharded"), precision = row.at("precision");
    EXPECT_TRUE(rows.insert({precision, what, shard}).second) << row;
    EXPECT_EQ(row.at("replicate"), 8 / shard);
    const auto& [parameters, gradients, optimizer] = kinds.at(precision);
    const bool p = what == "parameters", g = p || what == "gradients", o = g || what == "optimizer";
    const auto& bytes = row.at("bytes_per_parameter");
    const double expected[] = {parameters / (p ? shard : 1), gradients / (g ? shard : 1), optimizer / (o ? shard : 1)};
    EXPECT_DOUBLE_EQ(bytes.at("parameters"), expected[0]) << row;
    EXPECT_DOUBLE_EQ(bytes.at("gradients"), expected[1]) << row;
    EXPECT_DOUBLE_EQ(bytes.at("optimizer"), expected[2]) << row;
    const double total = expected[0] + expected[1] + expected[2];
    EXPECT_DOUBLE_EQ(bytes.at("total"), total) << row;
    EXPECT_DOUBLE_EQ(row.at("reduction_factor"), (parameters + gradients + optimizer) / total) << row;
    EXPECT_GE(row.at("state_bytes").get<double>(), total * json.at("parameters").get<double>());
  }
  // Nothing sharded, and each of three things over 2, 4 and 8 ranks.
  EXPECT_EQ(rows.size(), 3 * (1 + 3 * 3));
  EXPECT_EQ(given, 1);
  ASSERT_EQ(json.at("fits").size(), 3u);
  EXPECT_EQ(json.at("fits")[0].at("shard"), 1);
}

// The factors of the ZeRO paper, in the limit of many ranks.
TEST(PlanMemory, ReductionsComeToFourEightAndTheRanks) {
  const testing::Scratch scratch;
  scratch.write("a.toml", small);
  const auto ended = scratch.bonfire("plan a.toml --memory --gpus 65536 --set train.batch=65536 --json");
  ASSERT_EQ(ended.code, 0) << ended.err;
  const auto json = nlohmann::json::parse(ended.out);
  std::map<std::string, double> mixed;
  for (const auto& row : json.at("table"))
    if (row.at("precision") == "mixed" && row.at("shard") == 65536) mixed[row.at("sharded")] = row.at("reduction_factor");
  ASSERT_EQ(mixed.size(), 3u);
  EXPECT_NEAR(mixed.at("optimizer"), 4, 1e-3);
  EXPECT_NEAR(mixed.at("gradients"), 8, 1e-3);
  EXPECT_DOUBLE_EQ(mixed.at("parameters"), 65536);
}

TEST(PlanMemory, NamesTheStagesOfZero) {
  const testing::Scratch scratch;
  scratch.write("a.toml", small);
  const auto ended = scratch.bonfire("plan a.toml --memory --gpus 4");
  ASSERT_EQ(ended.code, 0) << ended.err;
  // F, what is sharded, its name, bytes of weights, gradients and the optimizer, their sum, and how many times less.
  for (const std::string words : {"1 none DDP 2 2 12 16 1x", "4 optimizer ZeRO-1 2 2 3 7 2.29x",
                                  "4 gradients ZeRO-2 2 0.5 3 5.5 2.91x", "4 parameters ZeRO-3 0.5 0.5 3 4 4x"})
    EXPECT_NE(single_spaced(ended.out).find(words), std::string::npos) << words << " is not in\n" << ended.out;
}

TEST(PlanMemory, IsReadableAndMarksTheFile) {
  const testing::Scratch scratch;
  scratch.write("a.toml", small);
  const auto ended = scratch.bonfire("plan a.toml --memory");
  ASSERT_EQ(ended.code, 0) << ended.err;
  for (const char* words : {"24 in total", "<- this file", "ZeRO-3", "mixed, fp32 gradients"}) {
    // One rank has nothing to shard.
    EXPECT_EQ(ended.out.find(words) != std::string::npos, std::string(words) != "ZeRO-3") << words << "\n" << ended.out;
  }
}

// More ranks have less of the batch each: the file's row is what a run on so many ranks measures.
TEST(PlanMemory, IsThatOfARunOnSoManyRanks) {
  const testing::Scratch scratch;
  // A benchmark saves nothing.
  scratch.write("a.toml",
                std::string("[run]\ndevice = \"cpu\"\n") + small + "[train]\nbatch = 64\n[checkpoint]\nevery = 0\n");
  const auto bytes = [&](const std::string& arguments, const char* key) {
    const auto ended = scratch.bonfire(arguments + " --json");
    EXPECT_EQ(ended.code, 0) << ended.err;
    return ended.code == 0 ? nlohmann::json::parse(ended.out).at(key).get<double>() : 0.0;
  };
  const double planned = bytes("plan a.toml --memory --gpus 4", "memory_bytes");
  const double measured = bytes("bench step a.toml --ranks 4 --steps 2", "peak_memory_bytes");
  EXPECT_NEAR(planned, measured, 0.05 * measured);
  EXPECT_GT(bytes("plan a.toml --memory", "memory_bytes"), 2 * planned);
  // The sharding factor stays, and there are more replicas.
  const char* sharded = " --set layout.shard=2 --set layout.replicate=1";
  EXPECT_EQ(bytes(std::string("plan a.toml --memory --gpus 4") + sharded, "memory_bytes"),
            bytes("plan a.toml --memory --set layout.shard=2 --set layout.replicate=2", "memory_bytes"));
}

TEST(PlanMemory, BadRequestsAreOneLine) {
  const testing::Scratch scratch;
  scratch.write("a.toml", small);
  for (const char* arguments :
       {"plan a.toml", "plan a.toml --memory --gpus 3", "plan a.toml --memory --gpus 4 --set layout.shard=8",
        "plan a.toml --memory --gpus 0", "plan a.toml --memory --cap -1", "plan b.toml --memory"}) {
    const auto ended = scratch.bonfire(arguments);
    EXPECT_EQ(ended.code, 2) << arguments;
    EXPECT_EQ(std::count(ended.err.begin(), ended.err.end(), '\n'), 1) << ended.err;
    EXPECT_EQ(ended.out, "");
  }
}

}  // namespace
}  // namespace bonfire::plan_test
