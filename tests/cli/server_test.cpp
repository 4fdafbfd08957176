// Parameter servers with the command and ranks that are processes.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <regex>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "tests/cli/command.h"

namespace bonfire::server_test {
namespace {

using testing::Scratch;

constexpr const char* tiny =
    "[run]\nname = \"tiny\"\ndevice = \"cpu\"\n[model]\ntype = \"llama\"\ndim = 16\nlayers = 2\nheads = 4\nkv_heads = 2\n"
    "ffn = 32\nvocab = 37\n[data]\nsequence = 8\n[train]\nsteps = 6\nbatch = 12\nmicrobatch = 2\nclip = 0.5\n[optimizer]\n"
    "warmup = 2\ndecay = \"constant\"\n[checkpoint]\nevery = 2\n";

class ServerCommand : public ::testing::Test {
 protected:
  ServerCommand() { scratch_.write("a.toml", tiny); }
  std::string train(const std::string& more) const {
    const auto ended = scratch_.bonfire("train a.toml " + more);
    EXPECT_EQ(ended.code, 0) << ended.err;
    return ended.err;
  }
  std::vector<nlohmann::json> metrics(const std::string& run) const {
    std::vector<nlohmann::json> lines;
    std::ifstream in(scratch_.path() / "runs" / run / "metrics.jsonl");
    for (std::string line; std::getline(in, line);) lines.push_back(nlohmann::json::parse(line));
    return lines;
  }
  void expect_near(const std::string& run, const std::string& expected_run) const {
    const auto got = metrics(run), expected = metrics(expected_run);
    ASSERT_EQ(got.size(), expected.size());
    for (std::size_t at = 0; at < got.size(); ++at) {
      EXPECT_EQ(got[at].at("step"), at + 1);
      for (const char* what : {"loss", "grad_norm", "lr"}) {
        const double value = got[at].at(what), wanted = expected[at].at(what);
        EXPECT_NEAR(value, wanted, 1e-5 * std::abs(wanted)) << what << " of step " << at + 1;
      }
    }
  }

  const Scratch scratch_;
};

TEST_F(ServerCommand, SynchronousServersTrainLikeReplicas) {
  train("--ranks 3 --set run.name=replicas");
  for (const int servers : {1, 2}) {
    const auto name = fmt::format("served{}", servers);
    const auto said = train(fmt::format("--set layout.server={} --set layout.replicate=3 --set run.name={}", servers, name));
    EXPECT_NE(said.find(fmt::format("3 workers and {} parameter server", servers)), std::string::npos) << said;
    EXPECT_NE(said.find("staleness 0.00 in the mean and 0 at most"), std::string::npos) << said;
    expect_near(name, "replicas");
    for (const auto& line : metrics(name)) EXPECT_EQ(line.at("staleness"), 0);
  }
}

TEST_F(ServerCommand, ARunGoesOnWithServersAndWithout) {
  train("--ranks 3 --set run.name=whole");
  train("--ranks 3 --set train.steps=2");
  train("--set layout.server=2 --set layout.replicate=3 --set train.steps=4 --resume latest");
  train("--ranks 2 --set layout.shard=2 --resume latest");
  expect_near("tiny", "whole");
}

TEST_F(ServerCommand, EveryGradientIsAnUpdateWhereWorkersDoNotWait) {
  for (const char* mode : {"asynchronous", "bounded"}) {
    const auto said = train(
        fmt::format("--set layout.server=2 --set layout.replicate=3 --set layout.server_mode={0} --set run.name={0}", mode));
    const auto lines = metrics(mode);
    ASSERT_EQ(lines.size(), 3u * 6u) << said;
    for (std::size_t at = 0; at < lines.size(); ++at) {
      EXPECT_EQ(lines[at].at("step"), at + 1);
      EXPECT_GE(lines[at].at("staleness"), 0);
      EXPECT_GT(lines[at].at("loss"), 0);
    }
    // In lockstep nobody is ahead by more than a step.
    for (const auto& line : lines)
      if (std::string(mode) == "bounded") {
        EXPECT_LE(line.at("staleness"), 2 * 3);
      }
  }
}

// A step is an update: a worker that is late to one does not lengthen the run, and a run that goes on finds its place.
TEST_F(ServerCommand, RunsWithBackupWorkersEndAfterTheirSteps) {
  for (const int servers : {1, 2}) {
    const auto run = fmt::format("backup{}", servers);
    const auto keys = fmt::format(
        "--set layout.server={} --set layout.replicate=3 --set layout.server_backup=1 --set run.name={}", servers, run);
    const auto said = train(keys + " --set train.steps=4");
    EXPECT_NE(said.find("4 updates, staleness 0.00"), std::string::npos) << said;
    const auto more = train(keys + " --set train.steps=9 --resume latest");
    EXPECT_NE(more.find("resumed after step 4"), std::string::npos) << more;
    EXPECT_NE(more.find("9 updates, staleness 0.00"), std::string::npos) << more;
    const auto lines = metrics(run);
    ASSERT_EQ(lines.size(), 9u);
    for (std::size_t at = 0; at < lines.size(); ++at) EXPECT_EQ(lines[at].at("step"), at + 1);
    EXPECT_TRUE(std::filesystem::exists(scratch_.path() / "runs" / run / "checkpoints" / "step-00000009")) << more;
  }
}

TEST_F(ServerCommand, GradientsThatAreNotFiniteEndTheRunUnlessTheyAreSkipped) {
  for (const char* mode : {"synchronous", "asynchronous"}) {
    const auto keys = fmt::format(
        "train a.toml --set layout.server=2 --set layout.replicate=2 --set layout.server_mode={0} --set run.name={0} --set "
        "optimizer.lr=1e25 --set optimizer.warmup=0 --set train.steps=12",
        mode);
    const auto stopped = scratch_.bonfire(keys);
    EXPECT_NE(stopped.code, 0);
    EXPECT_NE(stopped.err.find("the run ends (train.nan_policy = stop"), std::string::npos) << stopped.err;
    if (std::string(mode) == "synchronous") {
      EXPECT_NE(stopped.err.find("the gradients are not finite, although the losses are"), std::string::npos) << stopped.err;
    }
    const auto skipped = scratch_.bonfire(keys + " --set train.nan_policy=skip --set run.name=skipped-" + mode);
    EXPECT_EQ(skipped.code, 0) << skipped.err;
    EXPECT_GT(metrics(std::string("skipped-") + mode).back().at("skipped"), 0) << skipped.err;
  }
}

TEST_F(ServerCommand, PlanSaysWhatIsHeldAndSent) {
  const auto ended = scratch_.bonfire("plan a.toml --memory --set layout.server=2 --set layout.replicate=3");
  EXPECT_EQ(ended.code, 0) << ended.err;
  EXPECT_NE(ended.out.find("Parameter server (synchronous): 3 workers, 2 servers"), std::string::npos) << ended.out;
  // Twice the four Units' messages and the end of the step.
  EXPECT_NE(ended.out.find("exchanges 9 messages with each server"), std::string::npos) << ended.out;
  const auto listed = scratch_.bonfire("plan a.toml --memory --json --set layout.server=2 --set layout.replicate=3");
  const auto plan = nlohmann::json::parse(listed.out);
  std::int64_t bytes = 0;
  std::vector<std::string> kinds;
  for (const auto& message : plan.at("messages")) {
    bytes += message.at("bytes").get<std::int64_t>();
    kinds.push_back(message.at("kind"));
    EXPECT_NE(ended.out.find(message.at("what").get<std::string>() + "\n"), std::string::npos) << message;
  }
  EXPECT_EQ(kinds,
            (std::vector<std::string>{"send", "send", "send", "send", "send", "receive", "receive", "receive", "receive"}));
  EXPECT_EQ(plan.at("bytes_per_step"), 2 * bytes);
}

// A rank that is killed, server or worker, at a moment that nobody chose: BONFIRE_KILLS of each. All go back to the newest
// checkpoint.
TEST_F(ServerCommand, RanksThatAreKilledChangeNothing) {
  const char* asked = std::getenv("BONFIRE_KILLS");
  const int kills = asked ? std::atoi(asked) : 1;
  const std::string layout =
      "--set layout.server=1 --set layout.replicate=2 --set train.steps=2000 --set checkpoint.every=20";
  train(layout + " --set run.name=whole");
  for (const char* who : {"RANK=0", "RANK=2"})
    for (int kill = 0; kill < kills; ++kill) {
      SCOPED_TRACE(who);
      const auto run = fmt::format("killed-{}-{}", who[5], kill);
      const auto said = testing::run_shell(fmt::format(
          "cd {0} && (exec timeout 120 {1}/bonfire train a.toml {2} --max-restarts 1 --set run.name={3} >{3}.out 2>{3}.err) "
          "& "
          "until [ -e {0}/runs/{3}/checkpoints/latest ] || ! kill -0 $!; do sleep 0.02; done; sleep 0.$((RANDOM % 10)); "
          "for LAUNCHER in $! $(pgrep -P $!); do for R in $(pgrep -P $LAUNCHER); do "
          "grep -qz '^{4}$' /proc/$R/environ && kill -KILL $R; done; done; wait $!; CODE=$?; cat {0}/{3}.err; exit $CODE",
          scratch_.path().string(), BONFIRE_BUILD_DIR, layout, run, who));
      ASSERT_EQ(said.code, 0) << said.output;
      EXPECT_NE(said.output.find("restart 1 of 1"), std::string::npos) << said.output;
      EXPECT_NE(said.output.find(fmt::format("rank {} was killed", who[5])), std::string::npos) << said.output;
      const auto got = metrics(run), whole = metrics("whole");
      ASSERT_EQ(got.size(), whole.size());
      for (std::size_t at = 0; at < got.size(); ++at) ASSERT_EQ(got[at].at("loss"), whole[at].at("loss")) << at;
      const auto same = scratch_.bonfire(fmt::format("checkpoint diff runs/{} runs/whole", run));
      EXPECT_EQ(same.code, 0) << same.out << same.err;
    }
}

// Where each gradient is an update, what was done since the newest checkpoint is lost, and done otherwise: how much is said.
TEST_F(ServerCommand, UpdatesThatAKillHasLostAreCountedAndTheirSamplesTrainedAgain) {
  const char* asked = std::getenv("BONFIRE_KILLS");
  const int kills = asked ? std::atoi(asked) : 1;
  using Case = std::pair<const char*, const char*>;
  for (const auto& [mode, who] : {Case{"bounded", "RANK=0"}, Case{"asynchronous", "RANK=1"}, Case{"asynchronous", "RANK=3"}})
    for (int kill = 0; kill < kills; ++kill) {
      SCOPED_TRACE(fmt::format("{}, {}", mode, who));
      const auto run = fmt::format("{}-{}-{}", mode, who[5], kill);
      const auto said = testing::run_shell(fmt::format(
          "cd {0} && (exec timeout 120 {1}/bonfire train a.toml --set layout.server=2 --set layout.replicate=2 --set "
          "layout.server_mode={2} --set train.steps=500 --set layout.server_save_every=20 --max-restarts 1 --set "
          "run.name={3} >{3}.out 2>{3}.err) & "
          "until [ -e {0}/runs/{3}/checkpoints/latest ] || ! kill -0 $!; do sleep 0.02; done; sleep 0.$((RANDOM % 5)); "
          "for LAUNCHER in $! $(pgrep -P $!); do for R in $(pgrep -P $LAUNCHER); do "
          "grep -qz '^{4}$' /proc/$R/environ && kill -KILL $R; done; done; wait $!; CODE=$?; cat {0}/{3}.err; exit $CODE",
          scratch_.path().string(), BONFIRE_BUILD_DIR, mode, run, who));
      ASSERT_EQ(said.code, 0) << said.output;
      EXPECT_NE(said.output.find("weights: saved every 20 steps of 2 updates"), std::string::npos) << said.output;
      std::smatch found;
      const std::regex words(
          "updates ([0-9]+) to ([0-9]+) \\(([0-9]+)\\) were lost; samples from position ([0-9]+) on are trained again");
      ASSERT_TRUE(std::regex_search(said.output, found, words)) << said.output;
      const auto number = [&](std::size_t at) { return std::stoll(found[at]); };
      EXPECT_EQ(number(2) - number(1) + 1, number(3));
      // It went on from a checkpoint, of which the slowest worker says the place.
      const auto updates = number(1) - 1, steps = number(4) / 12;
      EXPECT_GE(updates, 20 * 2);
      EXPECT_EQ(number(4) % 12, 0);
      EXPECT_LE(steps * 2, updates);
      EXPECT_NE(said.output.find(fmt::format("resumed after step {}", steps)), std::string::npos) << said.output;
      // Every update since then has its line, once, and every sample since then is in one.
      const auto lines = metrics(run);
      ASSERT_EQ(lines.size(), static_cast<std::size_t>(updates + 2 * (500 - steps)));
      for (std::size_t at = 0; at < lines.size(); ++at) ASSERT_EQ(lines[at].at("step"), at + 1);
      EXPECT_TRUE(std::filesystem::exists(scratch_.path() / "runs" / run / "checkpoints" / "step-00000500")) << said.output;
    }
}

TEST_F(ServerCommand, ARequestToStopEndsAllRanksAfterOneStep) {
  const auto said = testing::run_shell(fmt::format(
      "cd {0} && (exec timeout 120 {1}/bonfire train a.toml --set layout.server=1 --set layout.replicate=2 --set "
      "train.steps=1000000 >out.txt 2>err.txt) & until [ -e {0}/runs/tiny/checkpoints/latest ] || ! kill -0 $!; do sleep "
      "0.02; done; kill -TERM $!; wait $!; CODE=$?; cat {0}/err.txt; exit $CODE",
      scratch_.path().string(), BONFIRE_BUILD_DIR));
  EXPECT_EQ(said.code, 3) << said.output;
  EXPECT_NE(said.output.find("stopped on request after step"), std::string::npos) << said.output;
}

}  // namespace
}  // namespace bonfire::server_test
