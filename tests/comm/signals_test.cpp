// What people and systems send to a launcher: signals, Ctrl-Z, a debugger, kernels without what it would like to use.
#include <sys/ptrace.h>
#include <sys/wait.h>

#include <filesystem>
#include <regex>
#include <sstream>
#include <thread>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "bonfire/comm/store_server.h"
#include "tests/comm/launched.h"

namespace bonfire::signals_test {
namespace {

using namespace std::chrono_literals;
using test::Child;
using test::contains;
using test::Folder;
using test::kBonfire;
using test::launch;
using test::process_of_rank;

const std::string kOldKernel = BONFIRE_BUILD_DIR "/old_kernel";

const std::map<std::string, std::string> kForeign = {{"LD_PRELOAD", FOREIGN_THREADS}};
const std::map<std::string, std::string> kQuick = {{"BONFIRE_HEARTBEAT_TIMEOUT", "2"}, {"BONFIRE_STALL_TIMEOUT", "2"}};

std::string unique_mark() { return "mark-" + random_token(); }

// The process of a rank that says "PID is up".
pid_t said_process(Child& run, int rank) {
  const std::regex words(fmt::format("\\[rank {}\\] (\\d+) is up", rank));
  std::smatch found;
  std::string output;
  const bool there = test::eventually([&] {
    output = run.output();
    return std::regex_search(output, found, words);
  });
  EXPECT_TRUE(there) << output;
  return there ? std::stoi(found[1]) : -1;
}

// The kernel may give a signal of the process to any thread that does not block it.
TEST(Signals, ForeignThreadsDoNotKeepTheEndOfARankFromTheLauncher) {
  for (int round = 0; round < 10; ++round) {
    Child run(launch({"-n", "2"}, "true"), kForeign);
    ASSERT_EQ(run.wait(60s), 0) << "round " << round << run.output();
  }
}

TEST(Signals, ForeignThreadsDoNotKeepRequestsFromTheRanks) {
  for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGUSR1}) {
    Child run(launch({"-n", "2"}, "trap 'echo heard; exit 3' INT TERM HUP USR1; echo up; while true; do sleep 0.05; done"),
              kForeign);
    ASSERT_TRUE(run.said("[rank 0] up"));
    ASSERT_TRUE(run.said("[rank 1] up"));
    run.send(signal);
    EXPECT_EQ(run.wait(30s), 3) << signal << run.output();
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
  EXPECT_EQ(run.wait(30s), 0) << run.output();
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
  EXPECT_EQ(run.wait(30s), 3) << run.output();
}

TEST(Signals, ChildrenThatAreIgnoredWhenItStartsAreWaitedForAllTheSame) {
  Child well({"env", "--ignore-signal=CHLD", kBonfire, "launch", "-n", "2", "--", "true"});
  EXPECT_EQ(well.wait(30s), 0) << well.output();
  Child failed({"env", "--ignore-signal=CHLD", kBonfire, "launch", "-n", "2", "--", "sh", "-c", "exit 4"});
  EXPECT_EQ(failed.wait(30s), 1) << failed.output();
  EXPECT_TRUE(contains(failed.output(), "ended with exit code 4")) << failed.output();
}

TEST(Signals, ARankThatWroteToOneThatHadEndedWellIsReported) {
  const Folder folder;
  Child run(
      launch({"-n", "2"}, fmt::format("echo $$ is up; [ $RANK = 0 ] || {{ while [ ! -e {}/gate ]; do sleep 0.02; done; "
                                      "kill -PIPE $$; }}",
                                      folder.path())));
  ASSERT_TRUE(run.said("[rank 1]"));
  const pid_t first = said_process(run, 0);
  // Its launcher has heard how it ended.
  ASSERT_TRUE(test::eventually([&] { return test::state_of(first) == '\0'; }));
  std::filesystem::create_directory(folder.path() + "/gate");
  EXPECT_EQ(run.wait(30s), 1) << run.output();
  EXPECT_TRUE(contains(run.output(), "rank 1 was killed by SIGPIPE (signal 13): (after rank 0 had ended with exit code 0)"))
      << run.output();
}

// Ctrl-Z, and fg longer afterwards than anybody may be silent.
TEST(Signals, RanksStopAndGoOnWithTheirLauncher) {
  Child run(launch(3), kQuick, {.own_group = true});
  std::vector<pid_t> ranks;
  for (int rank = 0; rank < 3; ++rank) ranks.push_back(process_of_rank(run, rank));
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
  const pid_t rank = process_of_rank(run, 2);
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

// What others wait while a rank is held counts against nobody: they begin to count when it goes on.
TEST(Signals, ARankThatADebuggerLetsGoHasAllOfItsTime) {
  constexpr auto limit = 4s;
  Child run(launch(3),
            {{"BONFIRE_HEARTBEAT_TIMEOUT", "4"}, {"BONFIRE_STALL_TIMEOUT", "4"}, {"FAULT", "nap"}, {"FAULT_RANK", "2"}});
  const pid_t rank = process_of_rank(run, 2);
  ASSERT_TRUE(run.said("sum 3"));
  if (ptrace(PTRACE_ATTACH, rank, nullptr, nullptr) != 0) GTEST_SKIP() << "ptrace is not permitted";
  ASSERT_EQ(waitpid(rank, nullptr, __WALL), rank);
  ASSERT_TRUE(run.said("rank 2 is held by a debugger"));
  std::this_thread::sleep_for(2 * limit + 1s);
  EXPECT_TRUE(run.running()) << run.output();
  // Then it does nothing, so that the others have to wait for it.
  ASSERT_EQ(kill(rank, SIGUSR1), 0);
  const auto free = std::chrono::steady_clock::now();
  ASSERT_EQ(ptrace(PTRACE_DETACH, rank, nullptr, nullptr), 0);
  ASSERT_TRUE(run.said("rank 2 is behind", 60s)) << run.output();
  EXPECT_GE(std::chrono::steady_clock::now() - free, limit) << run.output();
  EXPECT_EQ(run.wait(60s), 1) << run.output();
  // Rank 2 has not said anything of it: the lines of those who have are not its own.
  EXPECT_FALSE(contains(run.output(), "last lines")) << run.output();
}

TEST(Signals, AStopIsReportedWithWhatFollows) {
  Child run(launch(3), kQuick);
  const pid_t rank = process_of_rank(run, 1);
  ASSERT_TRUE(run.said("sum 3"));
  ASSERT_EQ(kill(rank, SIGSTOP), 0);
  ASSERT_TRUE(
      run.said(fmt::format("rank 1 was stopped by SIGSTOP (signal 19); kill -CONT {} lets it go on, the others give "
                           "it up after about 2 s (BONFIRE_HEARTBEAT_TIMEOUT)",
                           rank)));
  EXPECT_EQ(run.wait(60s), 1) << run.output();
}

// The process that a launcher has made for its own end, once it has its name.
pid_t guardian_of(const Child& launcher) {
  std::vector<pid_t> found;
  EXPECT_TRUE(test::eventually([&] {
    found = test::children_of(launcher.pid(), "bonfire-guard");
    return !found.empty();
  }));
  return found.empty() ? -1 : found.front();
}

TEST(Signals, AKilledGuardianIsReplaced) {
  const std::string mark = unique_mark();
  Child run(launch({"-n", "2"},
                   "trap '' TERM INT HUP; (trap '' TERM INT HUP; while true; do sleep 1; done) & echo up; while true; do "
                   "sleep 1; done"),
            {{"MARK", mark}});
  ASSERT_TRUE(run.said("[rank 0] up"));
  ASSERT_TRUE(run.said("[rank 1] up"));
  const pid_t guardian = guardian_of(run);
  ASSERT_GT(guardian, 0);
  kill(guardian, SIGKILL);
  ASSERT_TRUE(run.said("the launcher's guardian was killed: another one was started"));
  run.send(SIGKILL);
  EXPECT_EQ(run.wait(30s), -SIGKILL);
  EXPECT_TRUE(test::eventually([&] { return test::processes_with(mark).empty(); }, 30s));
}

TEST(Signals, AStoppedGuardianKeepsNobody) {
  const Folder folder;
  Child run(launch({"-n", "2"}, fmt::format("echo up; while [ ! -e {}/gate ]; do sleep 0.02; done", folder.path())));
  ASSERT_TRUE(run.said("[rank 0] up"));
  ASSERT_TRUE(run.said("[rank 1] up"));
  const pid_t guardian = guardian_of(run);
  ASSERT_GT(guardian, 0);
  ASSERT_EQ(kill(guardian, SIGSTOP), 0);
  std::filesystem::create_directory(folder.path() + "/gate");
  EXPECT_EQ(run.wait(60s), 0) << run.output();
  EXPECT_TRUE(test::eventually([&] { return test::has_ended(guardian); }));
  kill(guardian, SIGKILL);
}

// One request is one signal, whether or not the program knows ours.
TEST(Signals, AFailureSendsOneSigtermToTheOthers) {
  const Folder folder;
  Child run(launch({"-n", "3"}, fmt::format("if [ $RANK = 2 ]; then while [ ! -e {}/gate ]; do sleep 0.02; done; exit 4; "
                                            "fi; exec " TERM_COUNTER,
                                            folder.path())));
  ASSERT_TRUE(run.said("[rank 0] up"));
  ASSERT_TRUE(run.said("[rank 1] up"));
  std::filesystem::create_directory(folder.path() + "/gate");
  EXPECT_EQ(run.wait(30s), 1);
  for (const char* rank : {"[rank 0] ", "[rank 1] "}) {
    const std::string words = rank + std::string("plain SIGTERM\n"), said = run.output();
    EXPECT_TRUE(contains(said, words)) << said;
    EXPECT_EQ(said.find(words), said.rfind(words)) << said;
  }
  EXPECT_FALSE(contains(run.output(), "strange")) << run.output();
}

// The number of a rank is somebody else's once it has been waited for: what is killed then may be anybody's.
TEST(Signals, NobodyIsKilledByANumberThatIsFree) {
  Child run(launch({"-n", "3"}, "[ $RANK = 2 ] && exit 4; sleep 1000 & while true; do sleep 0.05; done"),
            {{"LD_PRELOAD", LATE_KILLS}});
  EXPECT_EQ(run.wait(30s), 1);
  const std::string said = run.output();
  // By all ranks, each with what it had started.
  EXPECT_TRUE(contains(said, "groups of 3 processes were killed before they were waited for, 0 behind")) << said;
}

// Clock ticks of the CPU that a process has taken.
long ticks_of(pid_t process) {
  const std::string stat = test::read_file(fmt::format("/proc/{}/stat", process));
  std::istringstream words(stat.substr(stat.rfind(')') + 2));
  std::string skipped;
  for (int field = 3; field < 14; ++field) words >> skipped;
  long user = 0, system = 0;
  words >> user >> system;
  return user + system;
}

// The kernel tells of the end of a rank at once, but whoever traces it hears how it ended before its parent can.
TEST(Signals, ARankThatADebuggerHasYetToLetGoCostsNothing) {
  Child run(launch({"-n", "1"}, "echo $$ is up; while true; do sleep 0.05; done"));
  const pid_t rank = said_process(run, 0);
  ASSERT_GT(rank, 0);
  if (ptrace(PTRACE_SEIZE, rank, nullptr, nullptr) != 0) GTEST_SKIP() << "ptrace is not permitted";
  ASSERT_EQ(kill(rank, SIGKILL), 0);
  ASSERT_TRUE(test::eventually([&] { return test::has_ended(rank); }));
  const long before = ticks_of(run.pid());
  std::this_thread::sleep_for(2s);
  EXPECT_LT(ticks_of(run.pid()) - before, 20) << "of 200";
  EXPECT_TRUE(run.running());
  ASSERT_EQ(waitpid(rank, nullptr, __WALL), rank);
  EXPECT_EQ(run.wait(60s), 1) << run.output();
  EXPECT_TRUE(contains(run.output(), "rank 0 was killed by SIGKILL")) << run.output();
}

// Whoever asks for the end while the others are ended does not have to wait for them to be started again.
TEST(Signals, ARequestDuringAFailureIsOneNotToStartAgain) {
  Child run(launch({"-n", "2", "--max-restarts", "3"},
                   "if [ $RANK = 1 ]; then exit 4; fi; trap '' TERM; while true; do sleep 0.05; done"));
  ASSERT_TRUE(run.said("ending the other ranks"));
  run.send(SIGTERM);
  EXPECT_EQ(run.wait(30s), 1) << run.output();
  EXPECT_FALSE(contains(run.output(), "restart 1")) << run.output();
}

class OldKernel : public ::testing::Test {
 protected:
  void SetUp() override {
    Child probe({kOldKernel, "true"});
    if (probe.wait(30s) == 77) GTEST_SKIP() << "seccomp is not permitted";
  }
  static std::vector<std::string> on_it(std::vector<std::string> words) {
    words.insert(words.begin(), kOldKernel);
    return words;
  }
};

TEST_F(OldKernel, RunsEnd) {
  Child well(on_it(launch({"-n", "2"}, "true")));
  EXPECT_EQ(well.wait(30s), 0) << well.output();
  Child failed(on_it(launch({"-n", "2"}, "if [ $RANK = 1 ]; then exit 4; fi; sleep 1000")));
  EXPECT_EQ(failed.wait(30s), 1) << failed.output();
}

TEST_F(OldKernel, NoOrphansAreLeft) {
  const std::string mark = unique_mark();
  Child run(on_it(launch({"-n", "2"}, "(while true; do sleep 1; done) & echo up; while true; do sleep 1; done")),
            {{"MARK", mark}});
  ASSERT_TRUE(run.said("[rank 0] up"));
  ASSERT_TRUE(run.said("[rank 1] up"));
  run.send(SIGKILL);
  EXPECT_EQ(run.wait(30s), -SIGKILL);
  EXPECT_TRUE(test::eventually([&] { return test::processes_with(mark).empty(); }, 30s));
}

}  // namespace
}  // namespace bonfire::signals_test
