// What a run leaves behind: folders of use have been named, and others go.
#include <csignal>
#include <filesystem>
#include <fstream>
#include <string>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "tests/comm/launched.h"
#include "tests/comm/pipe.h"
#include "tests/support/port.h"

namespace bonfire::folders_test {
namespace {

using namespace std::chrono_literals;
using test::Child;
using test::contains;
using test::Folder;
using test::kBonfire;
using test::launch;
using test::Pipe;

TEST(Folders, AFolderThatStaysIsNamedAndOneThatNobodyNeedsGoes) {
  const Folder folder;
  const auto left = [&] {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(folder.path())) names.push_back(entry.path());
    return names;
  };
  Child well(launch({"-n", "2"}, "true"), {{"TMPDIR", folder.path()}});
  EXPECT_EQ(well.wait(60s), 0);
  EXPECT_TRUE(left().empty());
  Child absent({kBonfire, "launch", "--", "/no/such/program"}, {{"TMPDIR", folder.path()}});
  EXPECT_EQ(absent.wait(60s), 2);
  EXPECT_TRUE(left().empty());
  Child failed(launch({"-n", "2"}, "exit 4"), {{"TMPDIR", folder.path()}});
  EXPECT_EQ(failed.wait(60s), 1);
  ASSERT_EQ(left().size(), 1u);
  EXPECT_TRUE(contains(failed.output(), "the ranks' output is in " + left().front())) << failed.output();
}

struct Benchmark {
  Benchmark() {
    std::ofstream(folder.path() + "/a.toml")
        << "[run]\nname = \"tiny\"\ndevice = \"cpu\"\n[model]\ndim = 16\nlayers = 1\nheads = 2\nvocab = "
           "32\n[data]\nsequence = 8\n[train]\nsteps = 2\nbatch = 64\n";
    std::filesystem::create_directory(temporary);
  }
  const Folder folder;
  const std::string temporary = folder.path() + "/tmp", runs = folder.path() + "/runs";
};

// Refused before anything was made: neither a folder nor a link to it.
TEST(Folders, ARunThatIsRefusedLeavesNoFolder) {
  const Benchmark run;
  for (const std::string command : {"bench step", "train"}) {
    Child refused({"sh", "-c",
                   fmt::format("ulimit -Sn 100; ulimit -Hn 100; exec {} {} {}/a.toml --ranks 64 --set run.folder={}",
                               kBonfire, command, run.folder.path(), run.runs)},
                  {{"TMPDIR", run.temporary}});
    EXPECT_EQ(refused.wait(60s), 2) << refused.output();
    EXPECT_TRUE(contains(refused.output(), "open files")) << refused.output();
    EXPECT_TRUE(std::filesystem::is_empty(run.temporary)) << command;
    EXPECT_FALSE(std::filesystem::exists(run.runs)) << command;
  }
}

// A rank that another launcher has started makes the folder itself.
TEST(Folders, ABenchmarkThatFailsUnderAnotherLauncherLeavesNoFolder) {
  const Benchmark run;
  const testing::Port port;
  auto variables = test::torchrun(port.number());
  variables["TMPDIR"] = run.temporary;
  Pipe pipe;
  // No file can hold a byte, as where the disk is full.
  Child failed({"sh", "-c",
                fmt::format("ulimit -f 0; exec env --ignore-signal=XFSZ {} bench step {}/a.toml --set run.disk_full=stop",
                            kBonfire, run.folder.path())},
               variables, {.output = pipe.ends[1]});
  const std::string said = pipe.read_all();
  EXPECT_EQ(failed.wait(60s), 1) << said;
  EXPECT_TRUE(contains(said, run.temporary)) << "it failed before there was a folder: " << said;
  EXPECT_TRUE(std::filesystem::is_empty(run.temporary)) << said;
}

// Training of one rank on each of two nodes.
struct TwoNodes {
  std::vector<std::string> node(const Benchmark& run, const std::string& number, int steps) const {
    return {kBonfire,
            "train",
            run.folder.path() + "/a.toml",
            "--ranks",
            "1",
            "--nodes",
            "2",
            "--node-rank",
            number,
            "--master",
            "127.0.0.2:" + port.number(),
            "--set",
            "run.folder=" + run.runs,
            "--set",
            fmt::format("train.steps={}", steps)};
  }
  const testing::Port port{"127.0.0.2"};
};

TEST(Folders, LogsOfSeveralNodesComeToTheRunFolder) {
  const Benchmark run;
  const TwoNodes nodes;
  Child zero(nodes.node(run, "0", 2), {{"TMPDIR", run.temporary}}),
      one(nodes.node(run, "1", 2), {{"TMPDIR", run.temporary}});
  EXPECT_EQ(zero.wait(60s), 0) << zero.output();
  EXPECT_EQ(one.wait(60s), 0) << one.output();
  const std::string folder = run.runs + "/tiny";
  EXPECT_TRUE(contains(test::read_file(folder + "/logs/rank-0.log"), "run folder: " + folder));
  EXPECT_TRUE(std::filesystem::exists(folder + "/logs/rank-1.log"));
  EXPECT_TRUE(std::filesystem::is_empty(run.temporary));
}

pid_t only_rank(const Child& launcher) {
  const std::vector<pid_t> ranks = test::children_of(launcher.pid(), "bonfire");
  EXPECT_EQ(ranks.size(), 1u);
  return ranks.empty() ? -1 : ranks.front();
}

// The rank that has made the folder may be ended before it can say anything.
TEST(Folders, TheFoldersOfARunThatFailsOnAnotherNodeAreNamed) {
  const Benchmark run;
  const TwoNodes nodes;
  constexpr int kEndless = 100'000'000;
  Child zero(nodes.node(run, "0", kEndless), {{"TMPDIR", run.temporary}}),
      one(nodes.node(run, "1", kEndless), {{"TMPDIR", run.temporary}});
  ASSERT_TRUE(test::eventually([&] { return contains(test::read_file(run.runs + "/tiny/metrics.jsonl"), "\n"); }, 60s));
  ASSERT_EQ(kill(only_rank(zero), SIGSTOP), 0);
  ASSERT_TRUE(zero.said("rank 0 was stopped"));
  ASSERT_EQ(kill(only_rank(one), SIGKILL), 0);
  EXPECT_EQ(one.wait(60s), 1);
  EXPECT_EQ(zero.wait(60s), 1);
  const std::string said = zero.output() + one.output();
  EXPECT_TRUE(contains(said, run.runs + "/tiny\n")) << said;
  for (const auto& entry : std::filesystem::directory_iterator(run.temporary))
    EXPECT_TRUE(contains(said, entry.path().string())) << entry.path() << said;
}

TEST(Folders, AKilledBenchmarkHasNamedItsFolder) {
  const Benchmark run;
  const testing::Port port;
  auto variables = test::torchrun(port.number());
  variables["TMPDIR"] = run.temporary;
  Child killed({kBonfire, "bench", "step", run.folder.path() + "/a.toml", "--steps", "100000000"}, variables);
  ASSERT_TRUE(killed.said(run.temporary, 60s));
  killed.send(SIGKILL);
  EXPECT_EQ(killed.wait(60s), -SIGKILL);
  for (const auto& entry : std::filesystem::directory_iterator(run.temporary))
    EXPECT_TRUE(contains(killed.output(), entry.path().string())) << entry.path() << killed.output();
}

TEST(Folders, AFolderThatCannotBeMadeIsRefusedWithTheReason) {
  Child run(launch({"-n", "2"}, "true"), {{"TMPDIR", "/proc"}});
  EXPECT_EQ(run.wait(60s), 1);
  EXPECT_TRUE(contains(run.output(), "cannot make a folder for the ranks' output in '/proc': ")) << run.output();
  EXPECT_FALSE(contains(run.output(), "Success")) << run.output();
}

}  // namespace
}  // namespace bonfire::folders_test
