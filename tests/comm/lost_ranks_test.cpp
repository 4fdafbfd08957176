// Ranks whose loss a run can bear: what the launcher does about them, and how those who count ranks hear of it.
#include <filesystem>
#include <future>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include <ATen/ops/ones.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "bonfire/base/error.h"
#include "bonfire/comm/held_ranks.h"
#include "bonfire/comm/launcher.h"
#include "bonfire/comm/rendezvous.h"
#include "bonfire/comm/returned_world.h"
#include "bonfire/comm/stall.h"
#include "bonfire/comm/stop_vote.h"
#include "bonfire/comm/store_client.h"
#include "bonfire/comm/store_server.h"
#include "bonfire/comm/watchdog.h"
#include "tests/comm/launched.h"
#include "tests/support/thrown.h"

namespace bonfire::lost_ranks_test {
namespace {

using namespace std::chrono_literals;
using test::contains;
using test::Folder;
using testing::expect_part;
using testing::thrown;
using Policy = LostRanks::Policy;

c10::intrusive_ptr<c10d::Store> own_store() { return c10::make_intrusive<c10d::HashStore>(); }

struct Launched {
  LaunchOutcome outcome;
  std::string words;
};

// Three ranks, of which 1 and 2 may be lost.
Launched run(const Folder& logs, Policy policy, const std::string& script, int most_returns = 3) {
  std::mutex mutex;
  std::string words;
  auto outcome = launch_ranks({.program = {"sh", "-c", script},
                               .ranks = 3,
                               .lost = LostRanks{.from = 1, .policy = policy, .most_returns = most_returns},
                               .log_folder = logs.path(),
                               .echo = Echo::first,
                               .log = Log([&](LogLevel, std::string_view line) {
                                 const std::lock_guard lock(mutex);
                                 words += std::string(line) + "\n";
                               })});
  return {std::move(outcome), words};
}

const std::string says_so = ": > \"$BONFIRE_MAY_BE_LOST_FILE\"; ";

TEST(LostRanks, TheOthersGoOnWithoutOneThatIsDropped) {
  const Folder logs;
  const auto [outcome, words] =
      run(logs, Policy::drop, "if [ $RANK = 1 ]; then " + says_so + "echo dying words; kill -9 $$; fi; exit 0");
  EXPECT_EQ(outcome.exit_code, 0) << words;
  EXPECT_EQ(outcome.dropped, std::vector<int>{1});
  expect_part(words, "rank 1 was killed by SIGKILL (signal 9); the others go on without it");
  expect_part(words, "| dying words");
  EXPECT_FALSE(std::filesystem::exists(logs.path() + "/rank-1.may-be-lost"));
}

TEST(LostRanks, OneThatIsWaitedForIsStartedAgainAlone) {
  const Folder logs;
  const auto [outcome, words] =
      run(logs, Policy::wait,
          "echo rank $RANK returned ${BONFIRE_RETURNS:-never}, may be $BONFIRE_WHEN_LOST; if [ $RANK = 2 ]; then " +
              says_so + "[ \"$BONFIRE_RETURNS\" = 2 ] || kill -9 $$; fi; exit 0");
  EXPECT_EQ(outcome.exit_code, 0) << words;
  EXPECT_TRUE(outcome.dropped.empty());
  EXPECT_EQ(outcome.restarts, 0);
  for (const int times : {1, 2})
    expect_part(words, fmt::format("rank 2 was killed by SIGKILL (signal 9); the others wait, and it is started again alone "
                                   "({} of at most 3 times)",
                                   times));
  EXPECT_EQ(test::read_file(logs.path() + "/rank-1.log"), "rank 1 returned never, may be wait\n");
  EXPECT_EQ(test::read_file(logs.path() + "/rank-2.log"), "rank 2 returned never, may be wait\n");
  EXPECT_EQ(test::read_file(logs.path() + "/rank-2.return-2.log"), "rank 2 returned 2, may be wait\n");
}

TEST(LostRanks, OneThatIsLostTooOftenEndsTheRun) {
  const Folder logs;
  const auto [outcome, words] =
      run(logs, Policy::wait, "if [ $RANK = 2 ]; then " + says_so + "exit 7; fi; while true; do sleep 0.05; done", 2);
  EXPECT_EQ(outcome.exit_code, 1) << words;
  expect_part(words, "rank 2 was started again 2 times and is lost once more: at most 2 times are allowed");
  expect_part(words, "rank 2 ended with exit code 7; ending the other ranks");
}

TEST(LostRanks, OtherEndsAreFailures) {
  const std::string others = "while true; do sleep 0.05; done";
  const auto note = [](const char* kind) {
    return fmt::format(
        "printf '{{\"kind\": \"{}\", \"message\": \"the loss is nan\", \"details\": \"\", \"at\": 1}}' > "
        "\"$BONFIRE_ERROR_FILE\"; exit 1",
        kind);
  };
  const struct {
    const char* what;
    std::string script, named;
    int code = 1;
  } cases[] = {
      {"before it has said so", "[ $RANK = 1 ] && kill -9 $$; ", "rank 1 was killed by SIGKILL (signal 9)"},
      {"one that is needed", "[ $RANK = 0 ] && exit 9; ", "rank 0 ended with exit code 9"},
      {"a configuration", "if [ $RANK = 1 ]; then " + says_so + "exit 2; fi; ", "rank 1 ended with exit code 2", 2},
      {"a run that is over", "if [ $RANK = 1 ]; then " + says_so + note("run") + "; fi; ", "rank 1 failed: the loss is nan"},
      {"a stall", "if [ $RANK = 1 ]; then " + says_so + note("stall") + "; fi; ", "the loss is nan"}};
  for (const auto& one : cases)
    for (const auto policy : {Policy::drop, Policy::wait}) {
      SCOPED_TRACE(fmt::format("{}, {}", one.what, name_of(policy)));
      const Folder logs;
      const auto [outcome, words] = run(logs, policy, one.script + others);
      EXPECT_EQ(outcome.exit_code, one.code) << words;
      expect_part(words, one.named + "; ending the other ranks");
    }
}

// Its end follows from that of another, which the launcher may hear of later.
TEST(LostRanks, OneThatHasLostAnotherIsLostOnlyIfThatIsAll) {
  const std::string note =
      "printf '{\"kind\": \"communication\", \"message\": \"connection closed\", \"details\": \"\", \"at\": 1}' > "
      "\"$BONFIRE_ERROR_FILE\"; exit 1";
  const std::string worker = "if [ $RANK = 1 ]; then " + says_so + note + "; fi; ";
  {
    const Folder logs;
    const auto [outcome, words] = run(logs, Policy::drop, worker + "exit 0");
    EXPECT_EQ(outcome.exit_code, 0) << words;
    EXPECT_EQ(outcome.dropped, std::vector<int>{1});
  }
  const Folder logs;
  const auto [outcome, words] =
      run(logs, Policy::drop,
          worker + "if [ $RANK = 0 ]; then while [ ! -e " + logs.path() +
              "/rank-1.error ]; do sleep 0.02; done; kill -9 $$; fi; while true; do sleep 0.05; done");
  EXPECT_EQ(outcome.exit_code, 1) << words;
  EXPECT_TRUE(outcome.dropped.empty());
  expect_part(words, "rank 0 was killed by SIGKILL (signal 9); ending the other ranks");
}

TEST(LostRanks, OptionsThatCannotBeAreRefused) {
  const auto refused = [](LostRanks lost) {
    return thrown<ConfigError>([&] { check_launch({.program = {"true"}, .ranks = 3, .lost = lost}); });
  };
  expect_part(refused({.from = 0}), "ranks from 0 on may be lost, of 3: from 1 to 2 is allowed");
  expect_part(refused({.from = 3}), "ranks from 3 on may be lost, of 3");
  expect_part(refused({.from = 1, .most_returns = -1}), "-1 returns of a lost rank");
}

TEST(LostRanks, NobodyIsSilentOrBehindBecauseOfOneThatIsGone) {
  Progress::Lane lane;
  lane.group = "all";
  lane.ranks = Members({0, 1, 2});
  std::vector<Observed> ranks(3);
  for (auto& rank : ranks) {
    auto& place = rank.progress.lanes.emplace_back(lane).collective;
    place.begun = 2;
    place.ended = 1;
    place.age = 1000;
  }
  auto& gone = ranks[2];
  gone.progress.lanes.front().collective = {};
  gone.silent = 1000;
  const StallLimits limits{.silent = 30, .behind = 300};
  expect_part(find_stall(ranks, limits).value_or(""), "rank 2 has not been heard of");
  gone.gone = true;
  EXPECT_FALSE(find_stall(ranks, limits)) << *find_stall(ranks, limits);
  // The others are looked at as before.
  ranks[1].silent = 1000;
  expect_part(find_stall(ranks, limits).value_or(""), "rank 1 has not been heard of");
}

// Rank 1 never says a word. As long as it is known to be lost, nobody minds; from its return on it has as long as any.
TEST(LostRanks, AWatchdogWaitsForOneThatComesBack) {
  const auto store = own_store();
  store->set(lost_key(1), lost_text(1, false));
  store->set(kAnyLost, std::string("yes"));
  std::promise<std::string> said;
  auto verdict = said.get_future();
  std::atomic<bool> once{false};
  const Watchdog watchdog(store, std::make_shared<ProgressBoard>(),
                          {.rank = 0,
                           .size = 2,
                           .limits = {.silent = 0.1, .behind = 0.1},
                           .interval = 20ms,
                           .on_stall =
                               [&](const std::string& words) {
                                 if (!once.exchange(true)) said.set_value(words);
                               },
                           .log = Log::silent()});
  // Many signs of life of its own, and as many looks at the other: more than its limit allows.
  std::string last;
  for (int beats = 0; beats < 30;) {
    store->wait({"watchdog/rank/0"}, 20s);
    if (const auto beat = store->get_to_str("watchdog/rank/0"); beat != std::exchange(last, beat)) ++beats;
    std::this_thread::yield();
  }
  EXPECT_EQ(verdict.wait_for(0s), std::future_status::timeout);
  store->set(returned_key(1), lost_text(1, false));
  ASSERT_EQ(verdict.wait_for(20s), std::future_status::ready);
  expect_part(verdict.get(), "rank 1 has not been heard of");
}

TEST(LostRanks, NobodyWaitsForTheVoteOfOneThatIsGone) {
  for (const bool before : {true, false}) {
    const auto store = own_store();
    const auto lose = [&] {
      store->set(lost_key(2), lost_text(1, true));
      store->set(kAnyLost, std::string("yes"));
    };
    std::vector<std::unique_ptr<StopVote>> votes;
    for (int rank = 0; rank < 2; ++rank)
      votes.push_back(std::make_unique<StopVote>(
          *store, StopVote::Options{.rank = rank, .size = 3, .patience = 100s, .log = Log::silent()}));
    if (before) lose();
    EXPECT_FALSE(votes[1]->is_last(1));
    for (auto& vote : votes) vote->ask();
    auto first = std::async(std::launch::async, [&] { return votes[0]->is_last(1); });
    if (!before) lose();
    ASSERT_EQ(first.wait_for(60s), std::future_status::ready);
    EXPECT_FALSE(first.get());
    EXPECT_TRUE(votes[0]->is_last(2));
    EXPECT_TRUE(votes[1]->is_last(2));
  }
}

TEST(LostRanks, OneThatIsBackHearsWhatTheOthersHaveAgreedOn) {
  const auto store = own_store();
  {
    StopVote first(*store, {.rank = 0, .size = 2, .log = Log::silent()}), second(*store, {.rank = 1, .size = 2});
    for (std::int64_t step = 1; step < 4; ++step) EXPECT_FALSE(first.is_last(step) || second.is_last(step));
    first.ask();
    second.ask();
  }
  StopVote returned(*store, {.rank = 1, .size = 2, .returned = true, .log = Log::silent()});
  EXPECT_FALSE(returned.is_last(3));
  EXPECT_TRUE(returned.is_last(4));
}

TEST(LostRanks, AreCountedOnceOnTheWayOut) {
  const StoreServer server({.token = "t", .log = Log::silent()});
  StoreClient client({.server = server.endpoint(), .token = "t"});
  const auto store = own_store();
  const auto leave = [&](int rank) {
    return std::async(std::launch::async, [&store, rank] { check_out_once(*store, rank, 3); });
  };
  std::vector<std::future<void>> out;
  out.push_back(leave(0));
  out.push_back(leave(1));
  store->wait({"check-out/rank/0", "check-out/rank/1"}, 20s);
  // Rank 1 was lost on its way out, and is back.
  out.push_back(leave(1));
  EXPECT_FALSE(store->check({"check-out/all left"}));
  out.push_back(leave(2));
  for (auto& one : out) one.get();
  EXPECT_EQ(store->add("check-out/left", 0), 3);

  // The same keys, as a launcher knows them.
  for (const int rank : {2, 2, 1}) check_out_lost(client, "attempt 0/", rank, 3);
  EXPECT_FALSE(client.check({"attempt 0/check-out/all left"}));
  HeldRanks launcher({.store = {.server = server.endpoint(), .token = "t"}, .log = Log::silent()});
  launcher.lost_for_good(0, 1, 3);
  EXPECT_TRUE(launcher.told(20s));
  client.wait({"attempt 0/check-out/all left", std::string("attempt 0/") + kAnyLost}, 20s);
  EXPECT_TRUE(lost_for_good(client.get({"attempt 0/" + lost_key(0)}, 1s).front()));
}

TEST(LostRanks, OneThatIsBackMustBeLikeTheOthers) {
  const auto store = own_store();
  check_in(*store, {.configuration = "lr = 1", .log = Log::silent()});
  check_in_again(*store, {.configuration = "lr = 1", .log = Log::silent()});
  expect_part(thrown<ConfigError>([&] { check_in_again(*store, {.configuration = "lr = 2", .log = Log::silent()}); }),
              "ranks differ in their configuration: rank 0 (");
}

TEST(LostRanks, OneThatIsBackHasNoPartInCollectivesOfAll) {
  const auto world = returned_world(own_store(), 1, 3, {.log = Log::silent()});
  EXPECT_EQ(world.rank(), 1);
  EXPECT_EQ(world.size(), 3);
  EXPECT_EQ(world.group().size(), 3);
  expect_part(thrown<Error>([&] { world.group().all_reduce(at::ones({2})).wait(); }), "rank 1 was lost and is back");
}

}  // namespace
}  // namespace bonfire::lost_ranks_test
