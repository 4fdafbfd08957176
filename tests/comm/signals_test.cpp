// What people and systems send to a launcher: signals, Ctrl-Z, a debugger, kernels without what it would like to use.
#include <sys/ptrace.h>
#include <sys/wait.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <regex>
#include <thread>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "bonfire/comm/store_server.h"
#include "tests/comm/launched.h"

namespace bonfire {
namespace {

using namespace std::chrono_literals;
using test::Child;
using test::contains;
using test::Folder;
using test::kBonfire;
using test::kProgram;
using test::launch;

const std::string kOldKernel = BONFIRE_BUILD_DIR "/old_kernel";

const std::map<std::string, std::string> kForeign = {{"LD_PRELOAD", FOREIGN_THREADS}};
const std::map<std::string, std::string> kQuick = {{"BONFIRE_HEARTBEAT_TIMEOUT", "2"}, {"BONFIRE_STALL_TIMEOUT", "2"}};

pid_t pid_of(Child& run, int rank) {
  const std::regex words(fmt::format("pid (\\d+) is rank {} ", rank));
  std::smatch found;
  std::string output;
  const bool there = test::eventually([&] {
    output = run.output();
    return std::regex_search(output, found, words);
  });
  EXPECT_TRUE(there) << output;
  return there ? std::stoi(found[1]) : -1;
}

std::string unique_mark() { return "mark-" + random_token(); }

// The kernel may give a signal of the process to any thread that does not block it.
TEST(Signals, ForeignThreadsDoNotKeepTheEndOfARankFromTheLauncher) {
  for (int round = 0; round < 25; ++round) {
    Child run(launch({"-n", "2"}, "true"), kForeign);
    ASSERT_EQ(run.wait(20s), 0) << "round " << round << run.output();
  }
}

TEST(Signals, ForeignThreadsDoNotKeepRequestsFromTheRanks) {
  for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGUSR1}) {
    Child run(launch({"-n", "2"}, "trap 'echo heard; exit 3' INT TERM HUP USR1; echo up; while true; do sleep 0.05; done"),
              kForeign);
    ASSERT_TRUE(run.said("[rank 0] up"));
    ASSERT_TRUE(run.said("[rank 1] up"));
    run.send(signal);
    EXPECT_EQ(run.wait(10s), 3) << signal << run.output();
    EXPECT_TRUE(contains(run.output(), "[rank 1] heard")) << run.output();
  }
}

TEST(Signals, WhatWasIgnoredStaysIgnored) {
  const Folder folder;
  // As nohup does.
  Child run(
      {"sh", "-c",
       fmt::format("trap '' HUP; exec {} launch -n 2 -- sh -c 'kill -HUP $$; echo up; while [ ! -e {}/gate ]; do sleep "
                   "0.02; done'",
                   kBonfire, folder.path())});
  ASSERT_TRUE(run.said("[rank 0] up"));
  ASSERT_TRUE(run.said("[rank 1] up"));
  run.send(SIGHUP);
  std::filesystem::create_directory(folder.path() + "/gate");
  EXPECT_EQ(run.wait(10s), 0) << run.output();
  EXPECT_FALSE(contains(run.output(), "SIGHUP")) << run.output();
}

// A shell and the kernel both send one when a terminal goes.
TEST(Signals, ASecondHangUpDoesNotHurry) {
  Child run(launch({"-n", "2"}, "trap 'sleep 0.5; echo saved; exit 3' HUP; echo up; while true; do sleep 0.05; done"));
  ASSERT_TRUE(run.said("[rank 0] up"));
  ASSERT_TRUE(run.said("[rank 1] up"));
  run.send(SIGHUP);
  ASSERT_TRUE(run.said("SIGHUP"));
  run.send(SIGHUP);
  EXPECT_EQ(run.wait(10s), 3) << run.output();
}

TEST(Signals, ChildrenThatAreIgnoredWhenItStartsAreWaitedForAllTheSame) {
  Child well({"env", "--ignore-signal=CHLD", kBonfire, "launch", "-n", "2", "--", "true"});
  EXPECT_EQ(well.wait(10s), 0) << well.output();
  Child failed({"env", "--ignore-signal=CHLD", kBonfire, "launch", "-n", "2", "--", "sh", "-c", "exit 4"});
  EXPECT_EQ(failed.wait(10s), 1) << failed.output();
  EXPECT_TRUE(contains(failed.output(), "ended with exit code 4")) << failed.output();
}

TEST(Signals, ARankThatWroteToOneThatHadEndedWellIsReported) {
  Child run(launch({"-n", "2"}, "if [ $RANK = 1 ]; then sleep 0.3; kill -PIPE $$; fi"));
  EXPECT_EQ(run.wait(10s), 1) << run.output();
  EXPECT_TRUE(contains(run.output(), "rank 1 was killed by SIGPIPE (signal 13): (after rank 0 had ended with exit code 0)"))
      << run.output();
}

// Ctrl-Z, and fg longer afterwards than anybody may be silent.
TEST(Signals, RanksStopAndGoOnWithTheirLauncher) {
  Child run(launch(3), kQuick, {.own_group = true});
  std::vector<pid_t> ranks;
  for (int rank = 0; rank < 3; ++rank) ranks.push_back(pid_of(run, rank));
  ASSERT_TRUE(run.said("sum 3"));
  run.send(SIGTSTP);
  for (const pid_t process : {run.pid(), ranks[0], ranks[1], ranks[2]})
    ASSERT_TRUE(test::eventually([&] { return test::state_of(process) == 'T'; })) << process;
  std::this_thread::sleep_for(5s);
  run.send(SIGCONT);
  for (const pid_t process : ranks) ASSERT_TRUE(test::eventually([&] { return test::state_of(process) != 'T'; })) << process;
  std::this_thread::sleep_for(5s);  // twice the limit that ends it otherwise
  EXPECT_TRUE(run.running()) << run.output();
  for (const char* word : {"heard", "behind", "reach", "was stopped"})
    EXPECT_FALSE(contains(run.output(), word)) << run.output();
}

TEST(Signals, ADebuggedRankIsNotCalledLost) {
  Child run(launch(3), kQuick);
  const pid_t rank = pid_of(run, 2);
  ASSERT_TRUE(run.said("sum 3"));
  if (ptrace(PTRACE_ATTACH, rank, nullptr, nullptr) != 0) GTEST_SKIP() << "ptrace is not permitted";
  ASSERT_EQ(waitpid(rank, nullptr, __WALL), rank);
  ASSERT_TRUE(run.said(fmt::format("rank 2 is held by a debugger (process {})", getpid())));
  std::this_thread::sleep_for(6s);  // three times the limit
  EXPECT_TRUE(run.running()) << run.output();
  ASSERT_EQ(ptrace(PTRACE_DETACH, rank, nullptr, nullptr), 0);
  ASSERT_TRUE(run.said("rank 2 goes on"));
  std::this_thread::sleep_for(3s);
  EXPECT_TRUE(run.running()) << run.output();
  for (const char* word : {"heard", "behind", "reach"}) EXPECT_FALSE(contains(run.output(), word)) << run.output();
}

TEST(Signals, AStopIsReportedWithWhatFollows) {
  Child run(launch(3), kQuick);
  const pid_t rank = pid_of(run, 1);
  ASSERT_TRUE(run.said("sum 3"));
  ASSERT_EQ(kill(rank, SIGSTOP), 0);
  ASSERT_TRUE(
      run.said(fmt::format("rank 1 was stopped by SIGSTOP (signal 19); kill -CONT {} lets it go on, the others give "
                           "it up after about 2 s (BONFIRE_HEARTBEAT_TIMEOUT)",
                           rank)));
  EXPECT_EQ(run.wait(20s), 1) << run.output();
}

TEST(Signals, AKilledGuardianIsReplaced) {
  const std::string mark = unique_mark();
  Child run(launch({"-n", "2"},
                   "trap '' TERM INT HUP; (trap '' TERM INT HUP; while true; do sleep 1; done) & echo up; while true; do "
                   "sleep 1; done"),
            {{"MARK", mark}});
  ASSERT_TRUE(run.said("[rank 0] up"));
  ASSERT_TRUE(run.said("[rank 1] up"));
  const std::vector<pid_t> guardians = test::children_of(run.pid(), "bonfire-guard");
  ASSERT_EQ(guardians.size(), 1u);
  kill(guardians.front(), SIGKILL);
  ASSERT_TRUE(run.said("the launcher's guardian was killed: another one was started"));
  run.send(SIGKILL);
  EXPECT_EQ(run.wait(5s), -SIGKILL);
  EXPECT_TRUE(test::eventually([&] { return test::processes_with(mark).empty(); }, 5s));
}

class OldKernel : public testing::Test {
 protected:
  void SetUp() override {
    Child probe({kOldKernel, "true"});
    if (probe.wait(10s) == 77) GTEST_SKIP() << "seccomp is not permitted";
  }
  static std::vector<std::string> on_it(std::vector<std::string> words) {
    words.insert(words.begin(), kOldKernel);
    return words;
  }
};

TEST_F(OldKernel, RunsEnd) {
  Child well(on_it(launch({"-n", "2"}, "true")));
  EXPECT_EQ(well.wait(10s), 0) << well.output();
  Child failed(on_it(launch({"-n", "2"}, "if [ $RANK = 1 ]; then exit 4; fi; sleep 1000")));
  EXPECT_EQ(failed.wait(10s), 1) << failed.output();
}

TEST_F(OldKernel, NoOrphansAreLeft) {
  const std::string mark = unique_mark();
  Child run(on_it(launch({"-n", "2"}, "(while true; do sleep 1; done) & echo up; while true; do sleep 1; done")),
            {{"MARK", mark}});
  ASSERT_TRUE(run.said("[rank 0] up"));
  ASSERT_TRUE(run.said("[rank 1] up"));
  run.send(SIGKILL);
  EXPECT_EQ(run.wait(5s), -SIGKILL);
  EXPECT_TRUE(test::eventually([&] { return test::processes_with(mark).empty(); }, 10s));
}

// Two launchers, as on two machines.
struct TwoNodes {
  test::Port port{"127.0.0.2"};
  std::vector<std::string> node(int number, const std::string& script) const {
    return launch(
        {"-n", "2", "--nodes", "2", "--node-rank", std::to_string(number), "--master", "127.0.0.2:" + port.number()},
        script);
  }
};

TEST(SignalsOfNodes, ARequestToOneLauncherIsOneToAll) {
  for (const int asked : {0, 1}) {
    const TwoNodes nodes;
    const std::string script = "trap 'echo saved; exit 3' TERM; echo up; while true; do sleep 0.05; done";
    Child zero(nodes.node(0, script)), one(nodes.node(1, script));
    ASSERT_TRUE(zero.said("[rank 1] up"));
    ASSERT_TRUE(one.said("[rank 3] up"));
    (asked == 0 ? zero : one).send(SIGTERM);
    for (Child* launcher : {&zero, &one}) {
      EXPECT_EQ(launcher->wait(20s), 3) << launcher->output();
      EXPECT_FALSE(contains(launcher->output(), "error")) << launcher->output();
    }
    EXPECT_TRUE(contains((asked == 0 ? one : zero).output(),
                         fmt::format("SIGTERM (signal 15) at the launcher of node {}: passed on to 2 ranks", asked)));
  }
}

// Ranks that lose those of another node blame nobody where that was asked to stop.
TEST(SignalsOfNodes, RanksThatAreLostByAStopAreNoFailure) {
  const TwoNodes nodes;
  const auto program = [&](int number) {
    return std::vector<std::string>{kBonfire,      "launch",
                                    "-n",          "1",
                                    "--nodes",     "2",
                                    "--node-rank", std::to_string(number),
                                    "--master",    "127.0.0.2:" + nodes.port.number(),
                                    "--",          kProgram};
  };
  Child zero(program(0)), one(program(1));
  ASSERT_TRUE(zero.said("sum 2"));
  ASSERT_TRUE(one.said("sum 2"));
  one.send(SIGTERM);
  for (Child* launcher : {&zero, &one}) {
    EXPECT_EQ(launcher->wait(20s), 1) << launcher->output();
    EXPECT_FALSE(contains(launcher->output(), "error")) << launcher->output();
  }
}

TEST(SignalsOfNodes, SigUsr1ReachesTheRanksOfAll) {
  const TwoNodes nodes;
  const std::string script = "trap 'echo heard; exit 3' USR1; echo up; while true; do sleep 0.05; done";
  Child zero(nodes.node(0, script)), one(nodes.node(1, script));
  ASSERT_TRUE(zero.said("[rank 1] up"));
  ASSERT_TRUE(one.said("[rank 3] up"));
  one.send(SIGUSR1);
  for (Child* launcher : {&zero, &one}) EXPECT_EQ(launcher->wait(20s), 3) << launcher->output();
}

// As long as a rank may be silent, 30 s unless told, and not 5 s.
TEST(SignalsOfNodes, ALauncherThatIsStoppedForSecondsIsNotGone) {
  const TwoNodes nodes;
  Child zero(nodes.node(0, "echo up; sleep 1000")), one(nodes.node(1, "echo up; sleep 1000"));
  ASSERT_TRUE(zero.said("[rank 1] up"));
  ASSERT_TRUE(one.said("[rank 3] up"));
  zero.send(SIGSTOP);
  std::this_thread::sleep_for(9s);
  EXPECT_TRUE(one.running()) << one.output();
  zero.send(SIGCONT);
  one.send(SIGTERM);
  EXPECT_EQ(one.wait(20s), 1) << one.output();
  EXPECT_FALSE(contains(one.output(), "gone")) << one.output();
}

// A training run that would take hours.
class Training : public testing::TestWithParam<int> {
 protected:
  Training() {
    std::ofstream(folder_.path() + "/a.toml") << "[run]\nname = \"tiny\"\ndevice = \"cpu\"\n[model]\ndim = 16\nlayers = "
                                                 "1\nheads = 2\nvocab = 32\n[data]\nsequence = 8\n[train]\nsteps = "
                                                 "100000000\nbatch = 4\n";
  }
  std::vector<std::string> train(std::vector<std::string> more) const {
    std::vector<std::string> words = {kBonfire, "train", folder_.path() + "/a.toml", "--set",
                                      "run.folder=" + folder_.path() + "/runs"};
    words.insert(words.end(), more.begin(), more.end());
    return words;
  }
  std::string metrics() const { return test::read_file(folder_.path() + "/runs/tiny/metrics.jsonl"); }
  void expect_steps() const {
    ASSERT_TRUE(test::eventually([&] { return contains(metrics(), "\n"); }, 60s));
  }
  void expect_stopped(Child& run) const {
    EXPECT_EQ(run.wait(30s), 3) << run.output();
    const std::string lines = metrics();
    const auto steps = std::count(lines.begin(), lines.end(), '\n');
    EXPECT_TRUE(
        contains(run.output(), fmt::format("stopped on request after step {} of 100000000; nothing was saved", steps)))
        << steps << run.output();
    EXPECT_FALSE(contains(run.output(), "error")) << run.output();
  }
  Folder folder_;
};

class StoppedTraining : public Training {};

TEST_P(StoppedTraining, EndsAfterTheStepOnAllRanksAndSaysThatNothingWasSaved) {
  Child run(train({"--ranks", "3", "--set", "train.batch=6"}));
  expect_steps();
  run.send(GetParam());
  expect_stopped(run);
}

INSTANTIATE_TEST_SUITE_P(Signals, StoppedTraining, testing::Values(SIGUSR1, SIGINT, SIGTERM, SIGHUP),
                         [](const auto& info) { return std::string(sigabbrev_np(info.param)); });

// `train` starts ranks on several nodes as `launch` does, and a signal to one of its commands is heard by all.
class TrainingOnNodes : public Training {};

TEST_P(TrainingOnNodes, EndsTogether) {
  const test::Port port("127.0.0.2");
  const auto node = [&](const char* number) {
    return train({"--ranks", "1", "--nodes", "2", "--node-rank", number, "--master", "127.0.0.2:" + port.number()});
  };
  Child zero(node("0")), one(node("1"));
  expect_steps();
  one.send(GetParam());
  expect_stopped(zero);
  EXPECT_EQ(one.wait(30s), 3) << one.output();
}

INSTANTIATE_TEST_SUITE_P(Signals, TrainingOnNodes, testing::Values(SIGUSR1),
                         [](const auto& info) { return std::string(sigabbrev_np(info.param)); });

}  // namespace
}  // namespace bonfire
