#include "bonfire/comm/launcher.h"

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <regex>
#include <thread>

#include <gtest/gtest.h>

#include "bonfire/base/error.h"
#include "bonfire/base/random.h"
#include "bonfire/comm/store_server.h"
#include "tests/comm/launched.h"
#include "tests/support/port.h"

namespace bonfire::launcher_test {
namespace {

using namespace std::chrono_literals;
using test::Child;
using test::contains;
using test::Folder;
using test::kBonfire;
using test::launch;

// A word that only the processes of one test carry.
std::string unique_mark() { return "mark-" + random_token(); }

TEST(Launcher, TellsEachRankItsPlace) {
  Child run(launch({"-n", "3"}, "echo $RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $GROUP_RANK $MASTER_ADDR $NCCL_DEBUG"),
            {{"NCCL_DEBUG", "WARN"}});
  EXPECT_EQ(run.wait(30s), 0);
  for (int rank = 0; rank < 3; ++rank)
    EXPECT_TRUE(contains(run.output(), fmt::format("[rank {}] {} 3 {} 3 0 127.0.0.1 WARN\n", rank, rank, rank)))
        << run.output();
}

TEST(Launcher, SharesTheCoresUnlessTold) {
  const std::string cores = std::to_string(std::max(1u, std::thread::hardware_concurrency() / 2));
  Child unset(launch({"-n", "2"}, "echo threads=$OMP_NUM_THREADS."), {{"OMP_NUM_THREADS", ""}});
  EXPECT_EQ(unset.wait(30s), 0);
  Child set(launch({"-n", "2"}, "echo threads=$OMP_NUM_THREADS."), {{"OMP_NUM_THREADS", "7"}});
  EXPECT_EQ(set.wait(30s), 0);
  EXPECT_TRUE(contains(unset.output(), "threads=" + cores + ".")) << unset.output();
  EXPECT_TRUE(contains(set.output(), "threads=7.")) << set.output();
}

TEST(Launcher, KeepsLinesWholeAndFilesApart) {
  const Folder logs;
  // Each line is written in two pieces, by four ranks at once.
  Child run(launch(
      {"-n", "4", "--logs", logs.path()},
      "for i in 1 2 3 4 5 6 7 8 9; do printf \"<$RANK-$RANK\"; sleep 0.01; printf \"$RANK-$RANK>\\n\" ; done; printf end"));
  EXPECT_EQ(run.wait(60s), 0);
  const std::regex line(R"(\[rank (\d)\] (<\1-\1\1-\1>|end))");
  std::istringstream lines(run.output());
  int count = 0;
  for (std::string text; std::getline(lines, text); ++count) EXPECT_TRUE(std::regex_match(text, line)) << text;
  EXPECT_EQ(count, 40);
  for (int rank = 0; rank < 4; ++rank) {
    const std::string log = test::read_file(fmt::format("{}/rank-{}.log", logs.path(), rank));
    const std::string unit = fmt::format("<{0}-{0}{0}-{0}>\n", rank);
    std::string expected;
    for (int i = 0; i < 9; ++i) expected += unit;
    EXPECT_EQ(log, expected + "end\n");
  }
}

struct Fault {
  const char* what;
  const char* script;
  const char* named;
  const char* others = "";
};

class LauncherFault : public ::testing::TestWithParam<Fault> {};

// Row 1 and row 3, for programs that know nothing of Bonfire.
TEST_P(LauncherFault, IsNamedAndEndsTheOthers) {
  const Random random(test::random_seed());
  const int ranks = 4, bad = static_cast<int>(random.below(0, ranks));
  const int delay = static_cast<int>(random.below(1, 400));
  const std::string mark = unique_mark();
  // Each has a child of its own that ignores SIGTERM; in one case the other ranks do so too.
  const std::string script = fmt::format(
      "(trap '' TERM; while true; do sleep 1; done) & if [ $RANK = {} ]; then sleep 0.{:03}; echo last words; {}; fi; {} "
      "echo up; while true; do sleep 1; done",
      bad, delay, GetParam().script, GetParam().others);
  Child run(launch({"-n", std::to_string(ranks)}, script), {{"MARK", mark}});
  ASSERT_TRUE(run.said("last words"));
  const auto failed = std::chrono::steady_clock::now();
  ASSERT_TRUE(run.said("ending the other ranks", 10s));
  EXPECT_EQ(run.wait(10s), 1);
  EXPECT_LT(std::chrono::steady_clock::now() - failed, 10s);
  EXPECT_TRUE(contains(run.output(), fmt::format("rank {} {}", bad, GetParam().named))) << run.output();
  EXPECT_TRUE(contains(run.output(), "| last words")) << run.output();
  EXPECT_TRUE(test::processes_with(mark).empty());
}

INSTANTIATE_TEST_SUITE_P(Row1And3, LauncherFault,
                         ::testing::Values(Fault{"Killed", "kill -9 $$", "was killed by SIGKILL (signal 9)",
                                                 "trap '' TERM;"},
                                           Fault{"Segfault", "kill -SEGV $$", "was killed by SIGSEGV (signal 11)"},
                                           Fault{"Abort", "kill -ABRT $$", "was killed by SIGABRT (signal 6)"},
                                           Fault{"Exit", "exit 1", "ended with exit code 1"},
                                           Fault{"OddExit", "exit 77", "ended with exit code 77"}),
                         [](const auto& info) { return info.param.what; });

// Its pipes stay open, so their end says nothing.
TEST(Launcher, AFailureIsSeenWhereSomebodyElseHoldsTheOutput) {
  const std::string mark = unique_mark();
  Child run(launch({"-n", "2"}, "if [ $RANK = 1 ]; then MARK=" + mark +
                                    " setsid sleep 1000 & echo pid $$; fi; while true; do sleep 0.05; done"));
  ASSERT_TRUE(run.said("pid "));
  const std::string output = run.output();
  ASSERT_EQ(kill(std::stoi(output.substr(output.find("pid ") + 4)), SIGKILL), 0);
  EXPECT_TRUE(run.said("rank 1 was killed by SIGKILL"));
  EXPECT_EQ(run.wait(60s), 1);
  for (const pid_t process : test::processes_with(mark)) kill(process, SIGKILL);
}

TEST(Launcher, LastWordsWithoutANewlineAreReported) {
  Child run(launch({"-n", "2"}, "if [ $RANK = 1 ]; then echo before; printf 'dying words'; exit 1; fi; sleep 1000"));
  EXPECT_EQ(run.wait(60s), 1);
  EXPECT_TRUE(contains(run.output(), "| dying words\n")) << run.output();
}

TEST(Launcher, RankZeroAloneMayDrawOverItself) {
  const Folder logs;
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  const int before = dup(STDOUT_FILENO);
  dup2(ends[1], STDOUT_FILENO);
  launch_ranks({.program = {"sh", "-c", "printf \"\\r$RANK 10%%\"; printf \"\\r$RANK 20%%\\n\"; echo line"},
                .ranks = 2,
                .log_folder = logs.path(),
                .echo = Echo::first,
                .log = Log::silent()});
  dup2(before, STDOUT_FILENO);
  close(before);
  close(ends[1]);
  char bytes[256];
  const ssize_t got = read(ends[0], bytes, sizeof bytes);
  close(ends[0]);
  EXPECT_EQ(std::string(bytes, static_cast<std::size_t>(std::max<ssize_t>(0, got))), "\r0 10%\r0 20%\nline\n");
  EXPECT_EQ(test::read_file(logs.path() + "/rank-1.log"), "1 20%\nline\n");
}

TEST(Launcher, LeavesNoOrphansWhenItIsKilled) {
  const Random random(test::random_seed());
  for (int round = 0; round < 3; ++round) {
    const std::string mark = unique_mark();
    // Ranks that ignore everything that can be ignored, and have children.
    Child run(launch({"-n", "3"},
                     "trap '' TERM INT HUP; (trap '' TERM INT HUP; while true; do sleep 1; done) & echo up; while true; do "
                     "sleep 1; done"),
              {{"MARK", mark}});
    if (round > 0) {
      ASSERT_TRUE(run.said("[rank 2] up"));
    }
    std::this_thread::sleep_for(std::chrono::microseconds(random.below(static_cast<std::uint64_t>(round), 30000)));
    run.send(SIGKILL);
    EXPECT_EQ(run.wait(30s), -SIGKILL);
    EXPECT_TRUE(test::eventually([&] { return test::processes_with(mark).empty(); }, 30s))
        << test::processes_with(mark).size() << " processes are left in round " << round;
  }
}

// The same, started by a shell: what the test above looks for can be there.
TEST(Launcher, AnotherParentLeavesOrphans) {
  const std::string mark = unique_mark();
  Child run({"sh", "-c", "sleep 1000 & echo up; wait"}, {{"MARK", mark}});
  ASSERT_TRUE(run.said("up"));
  run.send(SIGKILL);
  EXPECT_EQ(run.wait(30s), -SIGKILL);
  const std::vector<pid_t> orphans = test::processes_with(mark);
  EXPECT_EQ(orphans.size(), 1u);
  for (const pid_t orphan : orphans) kill(orphan, SIGKILL);
}

TEST(Launcher, PassesOnARequestToStop) {
  for (const int signal : {SIGINT, SIGTERM}) {
    Child run(launch({"-n", "2"}, "trap 'echo saved; exit 3' INT TERM; echo up; while true; do sleep 0.05; done"));
    ASSERT_TRUE(run.said("[rank 0] up"));
    ASSERT_TRUE(run.said("[rank 1] up"));
    run.send(signal);
    EXPECT_EQ(run.wait(30s), 3) << run.output();
    EXPECT_TRUE(contains(run.output(), "[rank 0] saved")) << run.output();
    EXPECT_TRUE(contains(run.output(), "[rank 1] saved")) << run.output();
  }
}

TEST(Launcher, ASecondRequestDoesNotWait) {
  const std::string mark = unique_mark();
  Child run(launch({"-n", "2"}, "trap '' INT; echo up; while true; do sleep 0.05; done"), {{"MARK", mark}});
  ASSERT_TRUE(run.said("[rank 0] up"));
  ASSERT_TRUE(run.said("[rank 1] up"));
  run.send(SIGINT);
  ASSERT_TRUE(run.said("SIGINT"));
  // One request may arrive as several signals: the second is one that comes more than a second after the first was heard.
  const auto heard = std::chrono::steady_clock::now();
  ASSERT_TRUE(test::eventually([&] { return std::chrono::steady_clock::now() - heard > 1100ms; }));
  run.send(SIGINT);
  EXPECT_EQ(run.wait(60s), 1);
  EXPECT_TRUE(test::processes_with(mark).empty());
}

TEST(Launcher, StartsAgainAsOftenAsAllowed) {
  const std::string script =
      "echo attempt $TORCHELASTIC_RESTART_COUNT; if [ $RANK = 1 ] && [ $TORCHELASTIC_RESTART_COUNT -lt 2 ]; then exit 5; fi";
  Child enough(launch({"-n", "2", "--max-restarts", "2"}, script));
  EXPECT_EQ(enough.wait(60s), 0) << enough.output();
  EXPECT_TRUE(contains(enough.output(), "[rank 0] attempt 2")) << enough.output();
  Child too_few(launch({"-n", "2", "--max-restarts", "1"}, script));
  EXPECT_EQ(too_few.wait(60s), 1) << too_few.output();
  EXPECT_TRUE(contains(too_few.output(), "[rank 1] attempt 1")) << too_few.output();
  EXPECT_FALSE(contains(too_few.output(), "attempt 2")) << too_few.output();
}

TEST(Launcher, ARefusedConfigurationIsNotTriedAgain) {
  Child run(launch({"-n", "2", "--max-restarts", "3"}, "echo try; exit 2"));
  EXPECT_EQ(run.wait(30s), 2);
  EXPECT_FALSE(contains(run.output(), "restart")) << run.output();
}

TEST(Launcher, BadRequestsAreRefusedBeforeAnythingStarts) {
  const auto refused = [](LauncherOptions options, const std::string& named) {
    options.log = Log::silent();
    try {
      launch_ranks(options);
      ADD_FAILURE() << "accepted: " << named;
    } catch (const ConfigError& error) {
      EXPECT_TRUE(contains(error.what(), named)) << error.what();
    }
  };
  refused({.program = {"true"}, .ranks = 0}, "0 ranks");
  refused({.program = {}}, "program");
  refused({.program = {"/no/such/program"}, .ranks = 2}, "/no/such/program");
  refused({.program = {"true"}, .nodes = 2, .node = 2, .master = {"127.0.0.1", 2000}}, "node rank 2");
  refused({.program = {"true"}, .nodes = 2}, "--master");
  refused({.program = {"true"}, .max_restarts = -1}, "-1");
}

TEST(Launcher, BadRequestsEndWithTwo) {
  const auto refused = [](std::vector<std::string> words, const std::string& named) {
    words.insert(words.begin(), {kBonfire, "launch"});
    Child run(words);
    EXPECT_EQ(run.wait(30s), 2) << run.output();
    EXPECT_TRUE(contains(run.output(), "bonfire: ")) << run.output();
    EXPECT_TRUE(contains(run.output(), named)) << run.output();
  };
  refused({"-n", "two", "--", "true"}, "two");
  refused({"-n", "2", "--", "/no/such/program"}, "/no/such/program");
  refused({"--master", "nowhere", "--", "true"}, "nowhere");
}

// Row 14.
TEST(Launcher, APortInUseIsNamedInOneLine) {
  const StoreServer other({.listen = {"127.0.0.1", 0}, .token = "t", .log = Log::silent()});
  const std::string port = std::to_string(other.endpoint().port);
  Child given(launch({"-n", "2", "--port", port}, "true"));
  EXPECT_EQ(given.wait(30s), 2);
  EXPECT_EQ(given.output(), "bonfire: port " + port + " of 127.0.0.1 is in use: give another one, or none for a free one\n");
  // With none given, two launchers at once do not meet.
  Child one(launch({"-n", "2"}, "sleep 0.2; true")), two(launch({"-n", "2"}, "sleep 0.2; true"));
  EXPECT_EQ(one.wait(30s), 0) << one.output();
  EXPECT_EQ(two.wait(30s), 0) << two.output();
}

// Two launchers, as on two machines, on two loopback addresses.
struct TwoNodes {
  testing::Port port{"127.0.0.2"};
  std::vector<std::string> node(int number, const std::string& script, std::vector<std::string> more = {}) const {
    std::vector<std::string> words = {
        "-n", "2", "--nodes", "2", "--node-rank", std::to_string(number), "--master", "127.0.0.2:" + port.number()};
    words.insert(words.end(), more.begin(), more.end());
    return launch(words, script);
  }
};

TEST(LauncherNodes, NumberTheirRanksThrough) {
  const TwoNodes nodes;
  const std::string script =
      "echo $RANK/$WORLD_SIZE local $LOCAL_RANK/$LOCAL_WORLD_SIZE node $GROUP_RANK at $MASTER_ADDR:$MASTER_PORT";
  Child one(nodes.node(1, script)), zero(nodes.node(0, script));
  EXPECT_EQ(zero.wait(60s), 0) << zero.output();
  EXPECT_EQ(one.wait(60s), 0) << one.output();
  EXPECT_TRUE(contains(zero.output(), "[rank 1] 1/4 local 1/2 node 0 at 127.0.0.2:" + nodes.port.number())) << zero.output();
  EXPECT_TRUE(contains(one.output(), "[rank 2] 2/4 local 0/2 node 1 at 127.0.0.2:" + nodes.port.number())) << one.output();
}

TEST(LauncherNodes, AFailureEndsAllNodesAndAllNameIt) {
  const TwoNodes nodes;
  const std::string script = "if [ $RANK = 3 ]; then sleep 0.3; kill -9 $$; fi; echo up; sleep 1000";
  const std::string mark = unique_mark();
  Child zero(nodes.node(0, script), {{"MARK", mark}}), one(nodes.node(1, script), {{"MARK", mark}});
  EXPECT_EQ(one.wait(30s), 1);
  EXPECT_EQ(zero.wait(30s), 1);
  for (const Child* launcher : {&zero, &one})
    EXPECT_TRUE(contains(launcher->output(), "rank 3 was killed by SIGKILL")) << launcher->output();
  EXPECT_TRUE(test::processes_with(mark).empty());
}

TEST(LauncherNodes, ALauncherThatVanishesEndsTheOther) {
  for (const int victim : {0, 1}) {
    const TwoNodes nodes;
    const std::string mark = unique_mark();
    const std::string script = "trap 'echo heard' USR1; echo up; while true; do sleep 0.05; done";
    Child zero(nodes.node(0, script), {{"MARK", mark}}), one(nodes.node(1, script), {{"MARK", mark}});
    for (const char* rank : {"[rank 0] up", "[rank 1] up"}) ASSERT_TRUE(zero.said(rank));
    for (const char* rank : {"[rank 2] up", "[rank 3] up"}) ASSERT_TRUE(one.said(rank));
    // A launcher that has not met the other yet waits for it.
    zero.send(SIGUSR1);
    ASSERT_TRUE(one.said("[rank 3] heard"));
    Child& gone = victim == 0 ? zero : one;
    Child& left = victim == 0 ? one : zero;
    gone.send(SIGKILL);
    EXPECT_EQ(left.wait(30s), 1);
    EXPECT_TRUE(contains(left.output(), fmt::format("the launcher of node {}", victim))) << left.output();
    EXPECT_TRUE(test::eventually([&] { return test::processes_with(mark).empty(); }, 30s));
  }
}

TEST(LauncherNodes, StartAgainTogether) {
  const TwoNodes nodes;
  const std::string script =
      "echo attempt $TORCHELASTIC_RESTART_COUNT; if [ $TORCHELASTIC_RESTART_COUNT = 0 ]; then if [ $RANK = 2 ]; then exit "
      "9; fi; sleep 1000; fi";
  Child zero(nodes.node(0, script, {"--max-restarts", "1"})), one(nodes.node(1, script, {"--max-restarts", "1"}));
  EXPECT_EQ(zero.wait(60s), 0) << zero.output();
  EXPECT_EQ(one.wait(60s), 0) << one.output();
  EXPECT_TRUE(contains(zero.output(), "[rank 0] attempt 1")) << zero.output();
  EXPECT_TRUE(contains(one.output(), "[rank 3] attempt 1")) << one.output();
}

TEST(LauncherNodes, AnotherTokenIsRefused) {
  const TwoNodes nodes;
  Child zero(nodes.node(0, "sleep 1000"), {{"BONFIRE_TOKEN", "one secret"}});
  Child one(nodes.node(1, "sleep 1000"), {{"BONFIRE_TOKEN", "another"}});
  EXPECT_EQ(one.wait(30s), 1);
  EXPECT_TRUE(contains(one.output(), "BONFIRE_TOKEN")) << one.output();
  EXPECT_TRUE(zero.said("does not know the job's token"));
}

TEST(Failure, TheFirstIsNotOneThatLostItsPeer) {
  RankFailure victim{
      .rank = 0, .code = 1, .note = FailureNote{FailureNote::Kind::communication, "connection closed", 10}, .at = 20};
  RankFailure thrower{.rank = 1, .code = 1, .note = FailureNote{FailureNote::Kind::exception, "bad sample", 15}, .at = 30};
  RankFailure later{.rank = 2, .code = 1, .note = FailureNote{FailureNote::Kind::exception, "worse sample", 16}, .at = 25};
  RankFailure killed{.rank = 3, .signal = 9, .at = 40};
  EXPECT_EQ(first_failure({victim, later, thrower}).rank, 1);
  EXPECT_EQ(first_failure({victim, later, thrower, killed}).rank, 3);
  EXPECT_EQ(first_failure({victim}).rank, 0);
  // Whoever writes to a rank that is gone dies of that.
  RankFailure wrote{.rank = 4, .signal = 13, .at = 5};
  EXPECT_EQ(first_failure({wrote, later, thrower}).rank, 1);
  EXPECT_EQ(first_failure({wrote, killed}).rank, 3);
  // Nor is one to blame that its library has ended, for it had lost another.
  RankFailure aborted{.rank = 5, .signal = 6, .note = FailureNote{FailureNote::Kind::communication, "lost", 1}, .at = 1};
  EXPECT_EQ(first_failure({aborted, later, thrower}).rank, 1);
}

TEST(Failure, TravelsWhole) {
  const RankFailure failure{.rank = 3,
                            .node = 1,
                            .signal = 11,
                            .note = FailureNote{FailureNote::Kind::stall, "late\xff", 7},
                            .last_lines = {"a", "b\x80"}};
  const auto back = decode_failure(encode(failure));
  ASSERT_TRUE(back.has_value());
  EXPECT_EQ(back->rank, 3);
  EXPECT_EQ(back->signal, 11);
  EXPECT_EQ(back->note->kind, FailureNote::Kind::stall);
  EXPECT_EQ(back->last_lines.size(), 2u);
  EXPECT_FALSE(decode_failure("no json"));
  EXPECT_FALSE(decode_failure("{}"));
}

}  // namespace
}  // namespace bonfire::launcher_test
