// What people send to one of several launchers, and what the others make of it.
#include <csignal>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "bonfire/comm/launcher.h"
#include "bonfire/comm/store_client.h"
#include "tests/comm/launched.h"
#include "tests/support/port.h"

namespace bonfire::signals_of_nodes_test {
namespace {

using namespace std::chrono_literals;
using test::Child;
using test::contains;
using test::kBonfire;
using test::kProgram;
using test::launch;
using test::process_of_rank;

// Two launchers, as on two machines.
struct TwoNodes {
  testing::Port port{"127.0.0.2"};
  std::vector<std::string> options(int number) const {
    return {"-n", "2", "--nodes", "2", "--node-rank", std::to_string(number), "--master", "127.0.0.2:" + port.number()};
  }
  std::vector<std::string> node(int number, const std::string& script, const std::vector<std::string>& more = {}) const {
    std::vector<std::string> words = options(number);
    words.insert(words.end(), more.begin(), more.end());
    return launch(words, script);
  }
  // Waits until both launchers know each other and all of their ranks have said that they are up.
  void up(Child& zero, Child& one) const {
    for (const int rank : {0, 1}) ASSERT_TRUE(zero.said(fmt::format("[rank {}] up", rank)));
    for (const int rank : {2, 3}) ASSERT_TRUE(one.said(fmt::format("[rank {}] up", rank)));
    const Endpoint master{"127.0.0.2", static_cast<std::uint16_t>(std::stoi(port.number()))};
    StoreClient store({.server = master, .token = job_token(process_variables(), to_string(master))});
    store.wait({"launchers/0/here/0", "launchers/0/here/1"}, 20s);
  }
};

TEST(SignalsOfNodes, ARequestToOneLauncherIsOneToAll) {
  for (const int asked : {0, 1}) {
    const TwoNodes nodes;
    const std::string script = "trap 'echo saved; exit 3' TERM; echo up; while true; do sleep 0.05; done";
    Child zero(nodes.node(0, script)), one(nodes.node(1, script));
    ASSERT_NO_FATAL_FAILURE(nodes.up(zero, one));
    (asked == 0 ? zero : one).send(SIGTERM);
    for (Child* launcher : {&zero, &one}) {
      EXPECT_EQ(launcher->wait(20s), 3) << launcher->output();
      EXPECT_FALSE(contains(launcher->output(), "error")) << launcher->output();
    }
    EXPECT_TRUE(contains((asked == 0 ? one : zero).output(),
                         fmt::format("SIGTERM (signal 15) at the launcher of node {}: passed on to 2 ranks", asked)));
  }
}

// Node 0 has the store: it does not leave before those that are on their way to it have heard of the request.
TEST(SignalsOfNodes, ANodeThatComesAfterTheRequestHearsOfIt) {
  const TwoNodes nodes;
  const std::string script = "trap 'exit 3' TERM; echo up; while true; do sleep 0.05; done";
  Child one(nodes.node(1, script));
  for (const int rank : {2, 3}) ASSERT_TRUE(one.said(fmt::format("[rank {}] up", rank)));
  one.send(SIGSTOP);
  ASSERT_TRUE(test::eventually([&] { return test::state_of(one.pid()) == 'T'; }));
  Child zero(nodes.node(0, script));
  for (const int rank : {0, 1}) ASSERT_TRUE(zero.said(fmt::format("[rank {}] up", rank)));
  zero.send(SIGTERM);
  ASSERT_TRUE(zero.said("passed on to 2 ranks"));
  ASSERT_TRUE(test::eventually([&] { return test::children_of(zero.pid(), "sh").empty(); }));
  one.send(SIGCONT);
  for (Child* launcher : {&zero, &one}) EXPECT_EQ(launcher->wait(20s), 3) << launcher->output();
  EXPECT_TRUE(contains(one.output(), "SIGTERM (signal 15) at the launcher of node 0: passed on to 2 ranks")) << one.output();
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

TEST(SignalsOfNodes, ANodeThatIsDoneStopsWithTheOthers) {
  const TwoNodes nodes;
  const std::string script =
      "trap 'exit 3' TERM; echo up; if [ $GROUP_RANK = 1 ]; then exit 0; fi; while true; do sleep 0.05; done";
  Child zero(nodes.node(0, script)), one(nodes.node(1, script));
  ASSERT_NO_FATAL_FAILURE(nodes.up(zero, one));
  ASSERT_TRUE(test::eventually([&] { return test::children_of(one.pid(), "sh").empty(); }));
  one.send(SIGTERM);
  for (Child* launcher : {&zero, &one}) EXPECT_EQ(launcher->wait(20s), 3) << launcher->output();
}

// A launcher that waits for another node before the next attempt hears what is asked of it.
TEST(SignalsOfNodes, ARequestBetweenTwoAttemptsIsHeard) {
  const TwoNodes nodes;
  const std::string script = "echo up; while true; do sleep 0.05; done";
  Child zero(nodes.node(0, script, {"--max-restarts", "1"})), one(nodes.node(1, script, {"--max-restarts", "1"}));
  ASSERT_NO_FATAL_FAILURE(nodes.up(zero, one));
  one.send(SIGKILL);
  ASSERT_TRUE(zero.said("the launcher of node 1"));
  ASSERT_TRUE(test::eventually([&] { return test::children_of(zero.pid(), "sh").empty(); }));
  zero.send(SIGTERM);
  EXPECT_EQ(zero.wait(30s), 1) << zero.output();  // it would wait for 35 s
  EXPECT_TRUE(contains(zero.output(), "not started again")) << zero.output();
}

// Ctrl-Z on node 0, which has no ranks left and waits for node 1 before the next attempt, for longer than anybody may be
// silent: the next attempt begins all the same.
TEST(SignalsOfNodes, ALauncherThatIsStoppedBetweenTwoAttemptsGoesOn) {
  const TwoNodes nodes;
  const std::string script =
      "if [ $TORCHELASTIC_RESTART_COUNT = 1 ]; then echo again; exit 0; fi; echo up; while true; do sleep 0.05; done";
  const std::map<std::string, std::string> limits = {{"BONFIRE_HEARTBEAT_TIMEOUT", "2"}};
  Child zero(nodes.node(0, script, {"--max-restarts", "1"}), limits, {.own_group = true});
  Child one(nodes.node(1, "trap '' TERM; " + script, {"--max-restarts", "1"}), limits);
  ASSERT_NO_FATAL_FAILURE(nodes.up(zero, one));
  for (const pid_t rank : test::children_of(zero.pid(), "sh")) kill(rank, SIGKILL);
  ASSERT_TRUE(zero.said("SIGKILL"));
  // Node 1's ranks do not listen, and are killed after some seconds.
  ASSERT_TRUE(test::eventually([&] { return test::children_of(zero.pid(), "sh").empty(); }));
  zero.send(SIGTSTP);
  ASSERT_TRUE(test::eventually([&] { return test::state_of(zero.pid()) == 'T'; }));
  std::this_thread::sleep_for(12s);  // node 1 is ready after 5, and would give up after 4 more
  zero.send(SIGCONT);
  for (Child* launcher : {&zero, &one}) EXPECT_EQ(launcher->wait(60s), 0) << launcher->output();
  EXPECT_TRUE(contains(zero.output(), "[rank 1] again")) << zero.output();
  EXPECT_TRUE(contains(one.output(), "[rank 3] again")) << one.output();
}

// Ctrl-Z on one node, and fg longer afterwards than anybody may be silent. Node 0 has the store of all.
class StoppedNode : public ::testing::TestWithParam<int> {};

TEST_P(StoppedNode, StopsTheRanksOfAllUntilItGoesOn) {
  const TwoNodes nodes;
  const auto program = [&](int number) {
    std::vector<std::string> words = {kBonfire, "launch"};
    const std::vector<std::string> options = nodes.options(number);
    words.insert(words.end(), options.begin(), options.end());
    words.insert(words.end(), {"--", kProgram});
    return words;
  };
  const std::map<std::string, std::string> limits = {{"BONFIRE_HEARTBEAT_TIMEOUT", "3"}, {"BONFIRE_STALL_TIMEOUT", "3"}};
  Child zero(program(0), limits, {.own_group = true}), one(program(1), limits, {.own_group = true});
  std::vector<pid_t> ranks;
  for (int rank = 0; rank < 4; ++rank) ranks.push_back(process_of_rank(rank < 2 ? zero : one, rank));
  ASSERT_TRUE(zero.said("sum 4"));
  ASSERT_TRUE(one.said("sum 4"));
  Child& stopped = GetParam() == 0 ? zero : one;
  stopped.send(SIGTSTP);
  ASSERT_TRUE(test::eventually([&] { return test::state_of(stopped.pid()) == 'T'; }));
  for (const pid_t rank : ranks) ASSERT_TRUE(test::eventually([&] { return test::state_of(rank) == 'T'; })) << rank;
  std::this_thread::sleep_for(9s);  // three times the limit
  stopped.send(SIGCONT);
  for (const pid_t rank : ranks) ASSERT_TRUE(test::eventually([&] { return test::state_of(rank) != 'T'; })) << rank;
  std::this_thread::sleep_for(5s);
  for (Child* launcher : {&zero, &one}) {
    EXPECT_TRUE(launcher->running()) << launcher->output();
    for (const char* word : {"gone", "reach", "heard", "behind"})
      EXPECT_FALSE(contains(launcher->output(), word)) << launcher->output();
  }
}

INSTANTIATE_TEST_SUITE_P(SignalsOfNodes, StoppedNode, ::testing::Values(0, 1));

// A launcher that was stopped and is killed then is a loss like any other.
TEST(SignalsOfNodes, ALauncherThatIsKilledWhileItIsStoppedEndsTheOther) {
  const TwoNodes nodes;
  const std::string script = "echo up; while true; do sleep 0.05; done";
  Child zero(nodes.node(0, script), {}, {.own_group = true}), one(nodes.node(1, script));
  ASSERT_NO_FATAL_FAILURE(nodes.up(zero, one));
  zero.send(SIGTSTP);
  ASSERT_TRUE(test::eventually([&] { return test::state_of(zero.pid()) == 'T'; }));
  ASSERT_TRUE(one.said("the launcher of node 0 was stopped"));
  zero.send(SIGKILL);
  EXPECT_EQ(one.wait(60s), 1) << one.output();
  EXPECT_TRUE(contains(one.output(), "the launcher of node 0 is gone")) << one.output();
}

TEST(SignalsOfNodes, SigUsr1ReachesTheRanksOfAll) {
  const TwoNodes nodes;
  const std::string script = "trap 'echo heard; exit 3' USR1; echo up; while true; do sleep 0.05; done";
  Child zero(nodes.node(0, script)), one(nodes.node(1, script));
  ASSERT_NO_FATAL_FAILURE(nodes.up(zero, one));
  one.send(SIGUSR1);
  for (Child* launcher : {&zero, &one}) EXPECT_EQ(launcher->wait(20s), 3) << launcher->output();
}

// As long as a rank may be silent, 30 s unless told, and not 5 s.
TEST(SignalsOfNodes, ALauncherThatIsStoppedForSecondsIsNotGone) {
  const TwoNodes nodes;
  Child zero(nodes.node(0, "echo up; sleep 1000")), one(nodes.node(1, "echo up; sleep 1000"));
  ASSERT_NO_FATAL_FAILURE(nodes.up(zero, one));
  zero.send(SIGSTOP);
  std::this_thread::sleep_for(9s);
  EXPECT_TRUE(one.running()) << one.output();
  zero.send(SIGCONT);
  one.send(SIGTERM);
  EXPECT_EQ(one.wait(60s), 1) << one.output();
  EXPECT_FALSE(contains(one.output(), "gone")) << one.output();
}

// A launcher that waits for another node's store hears what is asked of it, whatever it has tried to tell the others.
TEST(SignalsOfNodes, ALauncherWhoseStoreDoesNotAnswerHearsItsSignals) {
  const TwoNodes nodes;
  const std::string script = "trap 'echo heard' USR1; trap 'exit 3' TERM; echo up; while true; do sleep 0.05; done";
  const std::map<std::string, std::string> never = {{"BONFIRE_HEARTBEAT_TIMEOUT", "0"}};
  Child zero(nodes.node(0, script), never), one(nodes.node(1, script), never);
  ASSERT_NO_FATAL_FAILURE(nodes.up(zero, one));
  zero.send(SIGSTOP);
  ASSERT_TRUE(test::eventually([&] { return test::state_of(zero.pid()) == 'T'; }));
  one.send(SIGUSR1);
  EXPECT_TRUE(one.said("[rank 2] heard"));
  EXPECT_TRUE(one.said("[rank 3] heard"));
  one.send(SIGTERM);
  EXPECT_EQ(one.wait(40s), 3) << one.output();
  zero.send(SIGCONT);
}

TEST(SignalsOfNodes, ALauncherThatWaitsForNodeZeroHearsItsSignals) {
  const TwoNodes nodes;
  Child one(nodes.node(1, "trap 'exit 3' TERM; echo up; while true; do sleep 0.05; done"));
  ASSERT_TRUE(one.said("[rank 3] up"));
  ASSERT_TRUE(one.said("[rank 2] up"));
  one.send(SIGTERM);
  EXPECT_EQ(one.wait(40s), 3) << one.output();
}

}  // namespace
}  // namespace bonfire::signals_of_nodes_test
