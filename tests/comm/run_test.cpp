// Real ranks, real faults: rows 1, 2, 3, 11, 12, 13 and 18 of the list of faults.
#include <signal.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <optional>
#include <random>
#include <regex>
#include <thread>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "bonfire/base/error.h"
#include "bonfire/base/random.h"
#include "bonfire/comm/device.h"
#include "bonfire/comm/rendezvous.h"
#include "bonfire/comm/socket.h"
#include "bonfire/comm/store_client.h"
#include "bonfire/comm/store_server.h"
#include "tests/comm/launched.h"
#include "tests/support/port.h"

namespace bonfire::run_test {
namespace {

using namespace std::chrono_literals;
using test::Child;
using test::contains;
using test::expect_all_done;
using test::kBonfire;
using test::kProgram;
using test::launch;
using Variables = std::map<std::string, std::string>;

const std::string kOtherVersion = BONFIRE_BUILD_DIR "/other_version_program";

// What a run has said since it was started again for the `attempt`-th time; nothing before that.
std::string said_in(const Child& run, int attempt) {
  const std::string output = run.output();
  const std::size_t start = attempt == 0 ? 0 : output.find(fmt::format("restart {} of", attempt));
  return start == std::string::npos ? "" : output.substr(start);
}

// The process id of a rank, once it has said it.
pid_t pid_of(Child& run, int rank, int attempt = 0) {
  const std::regex words(fmt::format("pid (\\d+) is rank {} ", rank));
  std::smatch found;
  std::string output;
  const bool there = test::eventually([&] {
    output = said_in(run, attempt);
    return std::regex_search(output, found, words);
  });
  EXPECT_TRUE(there) << output;
  return there ? std::stoi(found[1]) : -1;
}

void expect_only_blamed(const std::string& output, int bad, int ranks) {
  for (int rank = 0; rank < ranks; ++rank)
    EXPECT_EQ(contains(output, fmt::format("error rank {} ", rank)), rank == bad) << output;
}

struct Crash {
  const char* fault;
  const char* named;
  const char* stack;  // in the last lines
};

class RunCrash : public ::testing::TestWithParam<Crash> {};

// Row 3: whatever ends a rank, at any moment, it is the one that is named, and not those that lost it.
void expect_crash_reported(const Crash& crash, int bad, const std::function<void(Child&, pid_t)>& inject) {
  Child run(launch(3), {{"FAULT", crash.fault}, {"FAULT_RANK", std::to_string(bad)}});
  const pid_t victim = pid_of(run, bad);
  ASSERT_TRUE(run.said("sum 3"));
  inject(run, victim);
  EXPECT_NE(run.wait(60s), 0);
  const std::string output = run.output();
  EXPECT_TRUE(contains(output, fmt::format("error rank {} {}", bad, crash.named))) << output;
  EXPECT_TRUE(contains(output, fmt::format("| about to {}", crash.fault))) << output;
  EXPECT_TRUE(contains(output, crash.stack)) << output;
  expect_only_blamed(output, bad, 3);
}

TEST_P(RunCrash, IsTheOneReported) {
  const Random random(test::random_seed());
  expect_crash_reported(GetParam(), static_cast<int>(random.below(0, 3)), [&](Child&, pid_t victim) {
    std::this_thread::sleep_for(std::chrono::microseconds(random.below(1, 20000)));
    ASSERT_EQ(kill(victim, SIGUSR1), 0);
  });
}

// The launcher looks only when all ranks have gone, so the order in which it finds them says nothing.
TEST_P(RunCrash, IsTheOneReportedWhereAllHaveGone) {
  const Random random(test::random_seed());
  const int bad = 1 + static_cast<int>(random.below(0, 2));  // not the first that it would find
  expect_crash_reported(GetParam(), bad, [&](Child& run, pid_t victim) {
    const std::vector<pid_t> ranks = {pid_of(run, 0), pid_of(run, 1), pid_of(run, 2)};
    run.send(SIGSTOP);
    std::this_thread::sleep_for(std::chrono::microseconds(random.below(1, 20000)));
    ASSERT_EQ(kill(victim, SIGUSR1), 0);
    EXPECT_TRUE(test::eventually([&] { return std::all_of(ranks.begin(), ranks.end(), test::has_ended); }));
    run.send(SIGCONT);
  });
}

INSTANTIATE_TEST_SUITE_P(Row3, RunCrash,
                         ::testing::Values(Crash{"throw", "failed: sample 42 is broken", ""},
                                           Crash{"exit", "ended with exit code 9", ""},
                                           Crash{"segfault", "was killed by SIGSEGV", "crashed with SIGSEGV; its stack:"},
                                           Crash{"abort", "was killed by SIGABRT", "crashed with SIGABRT; its stack:"},
                                           Crash{"terminate", "was killed by SIGABRT (signal 6): lost a rank", ""},
                                           Crash{"kill", "was killed by SIGKILL", ""},
                                           Crash{"fade", "ended with exit code 9", ""},
                                           Crash{"config", "failed: key 'x' is 7", ""}),
                         [](const auto& info) { return info.param.fault; });

int times_in(const std::string& text, const std::string& words) {
  int times = 0;
  for (std::size_t at = 0; (at = text.find(words, at)) != std::string::npos; ++at) ++times;
  return times;
}

TEST(Run, AnErrorIsSaidOnce) {
  Child all(launch(3), {{"FAULT", "throw"}, {"FAULT_RANK", "1"}, {"FAULT_STEP", "3"}});
  EXPECT_EQ(all.wait(30s), 1);
  EXPECT_EQ(times_in(all.output(), "sample 42 is broken"), 1) << all.output();
  EXPECT_EQ(times_in(all.output(), "failed"), 1) << all.output();
}

TEST(Run, TheStackOfLibTorchGoesToTheLogAlone) {
  const test::Folder folder;
  Child all(launch(2, {"--logs", folder.path()}), {{"FAULT", "torch"}, {"FAULT_RANK", "1"}, {"FAULT_STEP", "3"}});
  EXPECT_EQ(all.wait(30s), 1);
  EXPECT_EQ(times_in(all.output(), "libtorch has a stack"), 1) << all.output();
  EXPECT_FALSE(contains(all.output(), "frame #")) << all.output();
  const std::string log = test::read_file(folder.path() + "/rank-1.log");
  EXPECT_TRUE(contains(log, "frame #")) << log;
}

// The library of a GPU ends a rank that has lost another one by SIGABRT, which must not look like where it began.
TEST(RunOnGpu, TheRankThatFailedFirstIsNamedUnderNccl) {
  if (!gpu_available()) GTEST_SKIP() << "there is no GPU";
  for (const char* fault : {"throw", "exit", "kill"}) {
    Child run(launch(2), {{"DEVICE", "gpu"}, {"FAULT", fault}, {"FAULT_RANK", "1"}, {"FAULT_STEP", "5"}});
    EXPECT_EQ(run.wait(180s), 1) << run.output();
    expect_only_blamed(run.output(), 1, 2);
  }
}

// Row 1, from outside: a rank is killed at any moment, many times over, in the middle of collectives or between them.
TEST(Run, AKilledRankIsNamedAndTheRunStartsAgain) {
  const Random random(test::random_seed());
  const int times = 3;
  Child run(launch(3, {"--max-restarts", std::to_string(times)}),
            {{"STEPS", "5"}, {"ENDLESS_ATTEMPTS", std::to_string(times)}, {"ELEMENTS", "100000"}});
  for (int attempt = 0; attempt < times; ++attempt) {
    const auto draw = static_cast<std::uint64_t>(2 * attempt);
    const int bad = static_cast<int>(random.below(draw, 3));
    const pid_t victim = pid_of(run, bad, attempt);
    ASSERT_TRUE(test::eventually([&] { return contains(said_in(run, attempt), "sum 3"); })) << run.output();
    std::this_thread::sleep_for(std::chrono::microseconds(random.below(draw + 1, 20000)));
    ASSERT_EQ(kill(victim, SIGKILL), 0);
    ASSERT_TRUE(run.said(fmt::format("restart {} of {}", attempt + 1, times), 30s));
    const std::string output = said_in(run, attempt);
    const std::string until_restart = output.substr(0, output.find(fmt::format("restart {} of", attempt + 1)));
    EXPECT_TRUE(contains(until_restart, fmt::format("error rank {} was killed by SIGKILL (signal 9)", bad)))
        << until_restart;
    expect_only_blamed(until_restart, bad, 3);
  }
  EXPECT_EQ(run.wait(30s), 0) << run.output();
  EXPECT_TRUE(contains(said_in(run, times), "done")) << run.output();
}

const Variables kQuick = {{"BONFIRE_HEARTBEAT_TIMEOUT", "1.5"}, {"BONFIRE_STALL_TIMEOUT", "1.5"}};
const Variables kUnwatched = {{"BONFIRE_HEARTBEAT_TIMEOUT", "0"}, {"BONFIRE_STALL_TIMEOUT", "0"}};

Variables with(Variables variables, const Variables& more) {
  variables.insert(more.begin(), more.end());
  return variables;
}

// Row 2. Rank 0 is a watcher itself, rank 2 is not.
class RunStopped : public ::testing::TestWithParam<int> {};

TEST_P(RunStopped, RankIsNamed) {
  const Random random(test::random_seed());
  Child run(launch(3), kQuick);
  const pid_t victim = pid_of(run, GetParam());
  ASSERT_TRUE(run.said("sum 3"));
  std::this_thread::sleep_for(std::chrono::microseconds(random.below(0, 50000)));
  ASSERT_EQ(kill(victim, SIGSTOP), 0);
  EXPECT_EQ(run.wait(60s), 1) << run.output();
  const std::regex words(fmt::format(
      "rank {} (has not been heard of for [0-9.]+ s: it was|is behind:) in (no collective|all_reduce #\\d+ of 'world')",
      GetParam()));
  EXPECT_TRUE(std::regex_search(run.output(), words)) << run.output();
}

INSTANTIATE_TEST_SUITE_P(Row2, RunStopped, ::testing::Values(0, 2));

TEST(Run, WithoutAWatchdogNobodyIsNamed) {
  Child run(launch(2), kUnwatched), watched(launch(2), kQuick);
  const pid_t victim = pid_of(run, 1), watched_victim = pid_of(watched, 1);
  ASSERT_TRUE(run.said("sum 2"));
  ASSERT_TRUE(watched.said("sum 2"));
  ASSERT_EQ(kill(victim, SIGSTOP), 0);
  ASSERT_EQ(kill(watched_victim, SIGSTOP), 0);
  // One that is watched has ended for that by now.
  EXPECT_EQ(watched.wait(30s), 1) << watched.output();
  EXPECT_TRUE(run.running());
  EXPECT_FALSE(contains(run.output(), "behind")) << run.output();
  EXPECT_FALSE(contains(run.output(), "heard")) << run.output();
}

// A rank that sleeps, or has left a collective out: its heart beats, but the others wait for it.
TEST(Run, ARankThatSleepsIsNamedWithWhatTheOthersWaitIn) {
  Child run(launch(3), with(kQuick, {{"FAULT", "nap"}, {"FAULT_RANK", "1"}, {"FAULT_STEP", "7"}}));
  EXPECT_EQ(run.wait(60s), 1) << run.output();
  EXPECT_TRUE(contains(run.output(), "rank 1 is behind: in no collective; its last was all_reduce #7 of 'world'"))
      << run.output();
  EXPECT_TRUE(contains(run.output(), "ranks 0 and 2 wait in all_reduce #8 of 'world'")) << run.output();
  EXPECT_EQ(times_in(run.output(), "is behind"), 1) << run.output();
}

// Row 12, outside of debug mode: one rank performs one collective less and leaves.
TEST(Run, ARankThatLeftACollectiveOutIsNamed) {
  Child run(launch(3), with(kQuick, {{"FAULT", "skip"}, {"FAULT_RANK", "2"}, {"FAULT_STEP", "5"}, {"STEPS", "10"}}));
  EXPECT_EQ(run.wait(60s), 1) << run.output();
  EXPECT_TRUE(contains(run.output(), "rank 2 has left: in no collective; its last was all_reduce #9 of 'world'"))
      << run.output();
  EXPECT_TRUE(contains(run.output(), "ranks 0 and 1 wait in all_reduce #10 of 'world'")) << run.output();
}

TEST(Run, ALongCheckpointIsNoAlarm) {
  Child run(launch(2),
            {{"BONFIRE_HEARTBEAT_TIMEOUT", "4"}, {"BONFIRE_STALL_TIMEOUT", "4"}, {"BUSY_SECONDS", "8"}, {"STEPS", "6"}});
  expect_all_done(run, 2);
  EXPECT_FALSE(contains(run.output(), "behind")) << run.output();
}

// Row 12 in debug mode: in a random step one rank calls another collective than the others, or one less.
struct Mismatch {
  const char* fault;
  const char* called;
  int more = 0;  // elements than the others have
};

class RunMismatch : public ::testing::TestWithParam<Mismatch> {};

TEST_P(RunMismatch, NamesBothSides) {
  const Random random(test::random_seed());
  const int bad = static_cast<int>(random.below(0, 3));
  const int step = static_cast<int>(random.below(1, 40));
  Child run(launch(3), {{"DEBUG_MODE", "1"},
                        {"FAULT", GetParam().fault},
                        {"FAULT_RANK", std::to_string(bad)},
                        {"FAULT_STEP", std::to_string(step)}});
  EXPECT_EQ(run.wait(60s), 1) << run.output();
  const std::string called = fmt::format(fmt::runtime(GetParam().called), 256 + step + GetParam().more);
  const std::string others = fmt::format("all_reduce of Float \\[{}\\], sum", 256 + step);
  // Whoever sees it first speaks, on either side. Collectives are counted from 1.
  const std::regex words(
      fmt::format("error rank \\d failed: group 'world 0,1,2', collective #{0}: "
                  "(rank {1} calls {2}, but rank \\d calls {3}|rank \\d calls {3}, but rank {1} calls {2})\n",
                  step + 1, bad, called, others));
  EXPECT_TRUE(std::regex_search(run.output(), words)) << run.output();
}

// A rank that leaves one out comes with what the others do in their next step.
INSTANTIATE_TEST_SUITE_P(Row12, RunMismatch,
                         ::testing::Values(Mismatch{"shape", "all_reduce of Float \\[{}\\], sum", 1},
                                           Mismatch{"dtype", "all_reduce of Double \\[{}\\], sum"},
                                           Mismatch{"kind", "broadcast of Float \\[{}\\], from 0"},
                                           Mismatch{"skip", "all_reduce of Float \\[{}\\], sum", 1}),
                         [](const auto& info) { return info.param.fault; });

// Row 11.
TEST(Run, TheSlowestRankIsNamed) {
  const Random random(test::random_seed());
  const int slow = static_cast<int>(random.below(0, 3));
  const std::uint64_t from = random.below(1, 200);
  Child run(launch(3), {{"SLOW_RANK", std::to_string(slow)},
                        {"SLOW_STEP", std::to_string(from)},
                        {"STEPS", std::to_string(from + 60)},
                        {"BONFIRE_HEARTBEAT_TIMEOUT", "2"}});
  EXPECT_EQ(run.wait(60s), 0) << run.output();
  EXPECT_TRUE(contains(run.output(), fmt::format("rank {} is the slowest", slow))) << run.output();
}

// Row 13.
TEST(Run, AMissingRankIsNamed) {
  const std::uint64_t absent = Random(test::random_seed()).below(0, 4);
  Child run(launch(4), {{"ABSENT_RANK", std::to_string(absent)}, {"BONFIRE_RENDEZVOUS_TIMEOUT", "1.5"}});
  EXPECT_EQ(run.wait(60s), 1);
  EXPECT_TRUE(contains(run.output(), fmt::format("have 3 of 4, missing rank {} after 1.5 s", absent))) << run.output();
}

TEST(Run, TwoRanksWithOneNumberAreBothNamed) {
  Child run(launch(3), {{"TWICE_RANK", std::to_string(1 + Random(test::random_seed()).below(0, 2))}});
  EXPECT_EQ(run.wait(60s), 1);
  const std::regex words("two processes say they are rank 0: pid (\\d+) on \\S+ and pid (\\d+) on");
  std::smatch found;
  const std::string output = run.output();
  ASSERT_TRUE(std::regex_search(output, found, words)) << output;
  EXPECT_NE(found[1], found[2]);
}

// Row 18.
TEST(Run, ADifferentConfigurationIsNamed) {
  const std::uint64_t skewed = 1 + Random(test::random_seed()).below(0, 2);
  Child run(launch(3), {{"SKEW_RANK", std::to_string(skewed)}});
  EXPECT_EQ(run.wait(60s), 2);
  const std::regex words(
      fmt::format("ranks differ in their configuration: rank 0 \\(pid \\d+ on \\S+\\) has 'hash-a', "
                  "rank {} \\(pid \\d+ on \\S+\\) has 'hash-b'",
                  skewed));
  EXPECT_TRUE(std::regex_search(run.output(), words)) << run.output();
}

TEST(Run, AnotherVersionIsNamed) {
  const std::uint64_t skewed = 1 + Random(test::random_seed()).below(0, 2);
  const std::string script = fmt::format("if [ $RANK = {} ]; then exec {}; fi; exec {}", skewed, kOtherVersion, kProgram);
  Child run({kBonfire, "launch", "-n", "3", "--", "sh", "-c", script});
  EXPECT_EQ(run.wait(60s), 2);
  const std::regex words(
      fmt::format("ranks differ in their version: rank 0 \\(pid \\d+ on \\S+\\) has '{}', "
                  "rank {} \\(pid \\d+ on \\S+\\) has 'bonfire 9.9.9, LibTorch 2.11.0'",
                  CheckIn::own_version(), skewed));
  EXPECT_TRUE(std::regex_search(run.output(), words)) << run.output();
}

TEST(Run, AStrangerIsRefusedAndDisturbsNobody) {
  const Random random(test::random_seed());
  const testing::Port port("127.0.0.1");
  const test::Folder folder;
  Child run(launch(2, {"--port", port.number()}), {{"END_FILE", folder.path() + "/end"}});
  ASSERT_TRUE(run.said("sum 2"));
  for (std::uint64_t visit = 0; visit < 5; ++visit) {
    std::this_thread::sleep_for(std::chrono::microseconds(random.below(visit, 5000)));
    try {
      StoreClient({.server = {"127.0.0.1", std::stoi(port.number())}, .token = "a guess", .connect_timeout = 5s});
      ADD_FAILURE() << "a stranger was let in";
    } catch (const Error& error) {
      EXPECT_TRUE(contains(error.what(), "BONFIRE_TOKEN")) << error.what();
    }
  }
  // All visits are over, and the ranks are at work.
  std::ofstream(folder.path() + "/end").close();
  expect_all_done(run, 2);
  EXPECT_TRUE(contains(run.output(), "refused 127.0.0.1:")) << run.output();
}

TEST(Run, ARankWithoutTheTokenIsRefused) {
  const std::uint64_t stranger = Random(test::random_seed()).below(0, 3);
  const std::string script =
      fmt::format("if [ $RANK = {} ]; then export BONFIRE_TOKEN=guess; fi; exec {}", stranger, kProgram);
  Child run({kBonfire, "launch", "-n", "3", "--", "sh", "-c", script});
  EXPECT_EQ(run.wait(60s), 1);
  EXPECT_TRUE(std::regex_search(run.output(), std::regex(fmt::format("error rank {} failed: .*BONFIRE_TOKEN", stranger))))
      << run.output();
}

}  // namespace
}  // namespace bonfire::run_test
