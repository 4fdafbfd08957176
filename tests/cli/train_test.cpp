#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <sstream>
#include <vector>

#include <nlohmann/json.hpp>

#include "tests/cli/command.h"

// `bonfire train` with real processes, as a person would run it.
namespace bonfire::train_test {
namespace {
namespace fs = std::filesystem;
using bonfire::testing::Scratch;

constexpr const char* tiny = R"([run]
name = "tiny"
device = "cpu"
[model]
dim = 16
layers = 2
heads = 2
vocab = 40
[data]
sequence = 6
branching = 4
[train]
steps = 4
batch = 12
[optimizer]
lr = 0.01
warmup = 1
)";

std::vector<nlohmann::json> lines_of(const std::string& text) {
  std::vector<nlohmann::json> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(nlohmann::json::parse(line));
  return lines;
}

std::vector<double> losses(const Scratch& scratch, const std::string& folder) {
  std::vector<double> values;
  for (const auto& line : lines_of(scratch.read(folder + "/metrics.jsonl"))) values.push_back(line.at("loss").get<double>());
  return values;
}

TEST(Train, PrintsOneObjectAndLeavesItsFolder) {
  const Scratch scratch;
  scratch.write("a.toml", tiny);
  const auto ended = scratch.bonfire("train a.toml --ranks 2 --json --set train.trace_steps=1");
  ASSERT_EQ(ended.code, 0) << ended.err;
  const auto report = nlohmann::json::parse(ended.out);
  EXPECT_EQ(report.at("steps"), 4);
  EXPECT_EQ(report.at("run_folder"), "runs/tiny");
  for (const char* key : {"loss_first", "loss_last", "entropy_floor", "tokens_per_second", "peak_memory_bytes"}) {
    EXPECT_TRUE(report.at(key).is_number()) << key;
  }
  EXPECT_NE(ended.err.find("step: 1 "), std::string::npos) << ended.err;
  EXPECT_NE(ended.err.find("runs/tiny"), std::string::npos) << "the summary is missing from: " << ended.err;

  for (const char* file :
       {"config.toml", "metrics.jsonl", "trace.json", "report.json", "logs/rank-0.log", "logs/rank-1.log"}) {
    EXPECT_TRUE(fs::exists(scratch.path() / "runs/tiny" / file)) << file;
  }
  const auto is_event_file = [](const auto& entry) {
    return entry.path().filename().string().starts_with("events.out.tfevents.");
  };
  EXPECT_TRUE(std::any_of(fs::directory_iterator(scratch.path() / "runs/tiny"), fs::directory_iterator(), is_event_file));
  EXPECT_EQ(fs::read_symlink(scratch.path() / "runs/tiny-latest"), "tiny");

  const auto measured = losses(scratch, "runs/tiny");
  ASSERT_EQ(measured.size(), 4u);
  EXPECT_EQ(report.at("loss_first"), measured.front());
  EXPECT_EQ(report.at("loss_last"), measured.back());
  // The resolved file is a configuration of the same run.
  EXPECT_EQ(scratch.bonfire("train runs/tiny/config.toml --ranks 2 --set run.name=again --set train.trace_steps=0").code, 0);
  EXPECT_EQ(losses(scratch, "runs/again"), measured) << "two runs of one layout have equal bits";
}

TEST(Train, AnyNumberOfRanksGivesTheSameLosses) {
  const Scratch scratch;
  scratch.write("a.toml", tiny);
  ASSERT_EQ(scratch.bonfire("train a.toml --set run.name=one").code, 0);
  const auto expected = losses(scratch, "runs/one");
  ASSERT_EQ(expected.size(), 4u);
  for (const int ranks : {3, 4}) {
    const std::string number = std::to_string(ranks);
    const auto ended =
        scratch.bonfire("train a.toml --set train.microbatch=1 --ranks " + number + " --set run.name=r" + number);
    ASSERT_EQ(ended.code, 0) << ended.err;
    const auto measured = losses(scratch, "runs/r" + number);
    ASSERT_EQ(measured.size(), 4u);
    for (std::size_t i = 0; i < 4; ++i) EXPECT_NEAR(measured[i], expected[i], 1e-5 * expected[i]) << ranks << " ranks";
  }
}

// Blocks that belong to the root finish in another order than they were registered in, and move between buckets.
TEST(Train, AnyWrappingGivesTheSameNorms) {
  const Scratch scratch;
  scratch.write("a.toml", tiny);
  const auto norms = [&](const std::string& name, const std::string& layout) {
    const auto ended =
        scratch.bonfire("train a.toml --set run.name=" + name + " --set model.dim=64 --set model.vocab=4096 " + layout);
    EXPECT_EQ(ended.code, 0) << ended.err;
    std::vector<double> values;
    for (const auto& line : lines_of(scratch.read("runs/" + name + "/metrics.jsonl")))
      values.push_back(line.at("grad_norm").get<double>());
    return values;
  };
  const auto expected = norms("one", "--ranks 1");
  ASSERT_EQ(expected.size(), 4u);
  for (const std::string shard : {"2", "4"})
    for (const std::string sharded : {"optimizer", "gradients"}) {
      const auto measured =
          norms(sharded + shard,
                "--set 'layout.wrap_types=[\"embedding\", \"head\"]' --set train.microbatch=1 --set layout.shard=" + shard +
                    " --set layout.sharded=" + sharded + (sharded == "gradients" ? " --set layout.accumulation=full" : ""));
      ASSERT_EQ(measured.size(), 4u);
      for (std::size_t i = 0; i < 4; ++i)
        EXPECT_NEAR(measured[i], expected[i], 1e-5 * expected[i]) << sharded << " over " << shard << ", step " << i;
    }
}

TEST(Train, TheAxesSayHowManyRanksWhereNobodyElseDoes) {
  const Scratch scratch;
  scratch.write("a.toml", std::string(tiny) + "[layout]\nreplicate = 2\n");
  ASSERT_EQ(scratch.bonfire("train a.toml").code, 0);
  EXPECT_TRUE(fs::exists(scratch.path() / "runs/tiny/logs/rank-1.log"));
}

TEST(Train, RanksWinOverAnEnvironmentThatHappensToBeThere) {
  const Scratch scratch;
  scratch.write("a.toml", tiny);
  const auto ended = scratch.bonfire(
      "train a.toml --ranks 1", "RANK=3 WORLD_SIZE=4 LOCAL_RANK=3 LOCAL_WORLD_SIZE=4 MASTER_ADDR=127.0.0.1 MASTER_PORT=1");
  EXPECT_EQ(ended.code, 0) << ended.err;
}

TEST(Train, RanksThatSomebodyElseStartedAgreeOnOneFolder) {
  const Scratch scratch;
  scratch.write("a.toml", tiny);
  const auto ended = scratch.bonfire("launch -n 2 -- " BONFIRE_BUILD_DIR "/bonfire train a.toml");
  ASSERT_EQ(ended.code, 0) << ended.err;
  EXPECT_EQ(lines_of(scratch.read("runs/tiny/metrics.jsonl")).size(), 4u);
  EXPECT_FALSE(fs::exists(scratch.path() / "runs/tiny-2"));
}

TEST(Train, RanksWithDifferentConfigurationsDoNotTrainTogether) {
  const Scratch scratch;
  scratch.write("a.toml", tiny);
  const auto ended =
      scratch.bonfire("launch -n 2 -- sh -c '" BONFIRE_BUILD_DIR "/bonfire train a.toml --set optimizer.lr=0.$RANK'");
  EXPECT_EQ(ended.code, 2) << ended.err;
  EXPECT_NE(ended.err.find("ranks differ in their configuration"), std::string::npos) << ended.err;
  EXPECT_FALSE(fs::exists(scratch.path() / "runs")) << "something was started";
}

int times_in(const std::string& text, const std::string& words) {
  int times = 0;
  for (auto at = text.find(words); at != std::string::npos; at = text.find(words, at + words.size())) ++times;
  return times;
}

TEST(Train, OneRankHasALogAndIsStartedAgain) {
  const Scratch scratch;
  scratch.write("a.toml", tiny);
  const auto ended = scratch.bonfire("train a.toml --ranks 1 --max-restarts 1 --set fault.nan_step=2");
  EXPECT_EQ(ended.code, 1) << ended.err;
  EXPECT_EQ(times_in(ended.err, "starting all ranks again, restart 1 of 1"), 1) << ended.err;
  // Once an attempt, each of which has its own log.
  EXPECT_EQ(times_in(ended.err, "step 2: the loss is nan, from rank 0"), 2) << ended.err;
  for (const char* log : {"rank-0.log", "rank-0.restart-1.log"})
    EXPECT_EQ(times_in(scratch.read(std::string("runs/tiny/logs/") + log), "step 2: the loss is nan, from rank 0"), 1)
        << log;
}

TEST(Train, RestartsBelongToWhoStartedTheRank) {
  const Scratch scratch;
  scratch.write("a.toml", tiny);
  const auto ended =
      scratch.bonfire("train a.toml --max-restarts 2",
                      "RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=1");
  EXPECT_EQ(ended.code, 2) << ended.err;
  EXPECT_NE(ended.err.find("--max-restarts 2: torchrun has started this rank"), std::string::npos) << ended.err;
  EXPECT_EQ(times_in(ended.err, "\n"), 1) << ended.err;
  EXPECT_FALSE(fs::exists(scratch.path() / "runs")) << "something was started";
}

// 1.6 PB, more than any address space.
TEST(Train, MemoryThatIsNotThereIsOneLine) {
  const Scratch scratch;
  scratch.write("a.toml",
                "[run]\nname = \"big\"\ndevice = \"cpu\"\n[model]\ntype = \"vgg\"\nimage = 8\nchannels = 1\n"
                "convolutions = [4, 0]\npool = 100000\nffn = 10000\nclasses = 5\n");
  const auto ended = scratch.bonfire("train a.toml --ranks 1");
  EXPECT_EQ(ended.code, 1) << ended.err;
  EXPECT_EQ(times_in(ended.err, "out of memory: DefaultCPUAllocator: can't allocate memory"), 1) << ended.err;
  EXPECT_EQ(ended.err.find("frame #"), std::string::npos) << ended.err;
  // The layout, the error, and where the logs are.
  EXPECT_EQ(times_in(ended.err, "\n"), 3) << ended.err;
}

TEST(Train, ANanOnOneRankFailsTheRunAndNamesTheRank) {
  const Scratch scratch;
  scratch.write("a.toml", tiny);
  const auto ended = scratch.bonfire("train a.toml --ranks 2 --set fault.nan_step=2 --set fault.nan_rank=1");
  EXPECT_EQ(ended.code, 1) << ended.err;
  EXPECT_EQ(times_in(ended.err, "step 2: the loss is nan, from rank 1"), 1) << ended.err;
  EXPECT_EQ(lines_of(scratch.read("runs/tiny/metrics.jsonl")).size(), 2u);
}

TEST(BenchStep, ThatFailsKeepsTheLogsItNames) {
  const Scratch scratch;
  scratch.write("a.toml", tiny);
  fs::create_directory(scratch.path() / "tmp");
  const auto ended = scratch.bonfire("bench step a.toml --ranks 2 --steps 3 --set fault.nan_step=2",
                                     "TMPDIR='" + (scratch.path() / "tmp").string() + "'");
  EXPECT_EQ(ended.code, 1) << ended.err;
  const std::string words = "the ranks' output is in ";
  const auto at = ended.err.find(words);
  ASSERT_NE(at, std::string::npos) << ended.err;
  const auto start = at + words.size();
  const fs::path folder = ended.err.substr(start, ended.err.find('\n', start) - start);
  EXPECT_TRUE(fs::exists(folder / "rank-0.log")) << folder;
}

TEST(BenchStep, PrintsItsKeysAndLeavesNothing) {
  const Scratch scratch;
  scratch.write("a.toml", tiny);
  const auto ended = scratch.bonfire("bench step a.toml --ranks 2 --steps 3 --json");
  ASSERT_EQ(ended.code, 0) << ended.err;
  const auto report = nlohmann::json::parse(ended.out);
  for (const char* key : {"tokens_per_second", "step_ms", "peak_memory_bytes", "predicted_memory_bytes"}) {
    EXPECT_GT(report.at(key).get<double>(), 0) << key;
  }
  EXPECT_GE(report.at("exposed_communication").get<double>(), 0);
  EXPECT_LE(report.at("exposed_communication").get<double>(), 1);
  EXPECT_TRUE(!fs::exists(scratch.path() / "runs") || fs::is_empty(scratch.path() / "runs"));
  EXPECT_EQ(ended.err.find("weights"), std::string::npos) << ended.err;  // nobody asks a measurement for any
}

}  // namespace
}  // namespace bonfire::train_test
