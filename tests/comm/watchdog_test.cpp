#include "bonfire/comm/watchdog.h"

#include <atomic>
#include <future>
#include <mutex>
#include <thread>

#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "bonfire/base/error.h"
#include "bonfire/comm/beats.h"
#include "bonfire/comm/gpu_sharing.h"
#include "bonfire/comm/rendezvous.h"

namespace bonfire::watchdog_test {
namespace {

using namespace std::chrono_literals;

const StallLimits kLimits{.silent = 30, .behind = 10};

Progress::Lane lane(std::int64_t begun, std::int64_t ended, double age, std::vector<int> ranks = {0, 1, 2}) {
  Progress::Lane made;
  made.group = "replicate";
  made.ranks = std::move(ranks);
  made.collective = {begun, ended, CollectiveKind::all_reduce, age};
  return made;
}

Observed rank_in(Progress::Lane lane) {
  Observed rank;
  rank.progress.lanes = {std::move(lane)};
  return rank;
}

TEST(Stall, NobodyIsLateWhereAllAreTogether) {
  EXPECT_FALSE(find_stall({rank_in(lane(5, 5, 1000)), rank_in(lane(5, 5, 1000)), rank_in(lane(5, 5, 1000))}, kLimits));
  EXPECT_FALSE(find_stall({rank_in(lane(6, 5, 9)), rank_in(lane(6, 5, 9)), rank_in(lane(5, 5, 9))}, kLimits));
}

TEST(Stall, TheOneTheOthersWaitForIsNamedWithThePlaces) {
  std::vector<Observed> ranks = {rank_in(lane(18, 17, 12)), rank_in(lane(18, 17, 11)), rank_in(lane(17, 16, 12.3))};
  EXPECT_EQ(find_stall(ranks, kLimits),
            "rank 2 is behind: in all_reduce #17 of 'replicate' since 12.3 s ago; ranks 0 and 1 wait in all_reduce #18 of "
            "'replicate'");
  EXPECT_FALSE(find_stall(ranks, {.silent = 30, .behind = 0}));
  ranks[2].progress.busy = "checkpoint";
  EXPECT_FALSE(find_stall(ranks, kLimits));
}

TEST(Stall, ASilentRankIsNamedEvenWhereItIsBusy) {
  std::vector<Observed> ranks = {rank_in(lane(18, 17, 12)), rank_in(lane(18, 17, 11)), rank_in(lane(17, 17, 5))};
  ranks[2].silent = 31;
  ranks[2].progress.busy = "checkpoint";
  const auto text = find_stall(ranks, kLimits);
  ASSERT_TRUE(text.has_value());
  EXPECT_EQ(text->find("rank 2 has not been heard of for 31.0 s"), 0u) << *text;
  ranks[2].progress.finished = true;
  ranks[2].progress.lanes[0].collective = {18, 18, CollectiveKind::all_reduce, 1};
  EXPECT_FALSE(find_stall(ranks, kLimits));
}

// What somebody held a rank for is nobody's fault: not its own, nor of those who wait further down.
TEST(Stall, TimeInWhichARankWasHeldDoesNotCount) {
  std::vector<Observed> ranks = {rank_in(lane(18, 17, 50)), rank_in(lane(18, 17, 50)), rank_in(lane(17, 16, 50))};
  ASSERT_TRUE(find_stall(ranks, kLimits));
  for (const std::size_t held : {0u, 1u, 2u}) {
    std::vector<Observed> some = ranks;
    for (const double free : {0.0, 9.9}) {
      some[held].free = free;
      EXPECT_FALSE(find_stall(some, kLimits)) << held << " " << free;
    }
    some[held].free = 10.1;
    EXPECT_EQ(find_stall(some, kLimits), find_stall(ranks, kLimits)) << held;
  }
  ranks[2].silent = 50;
  ranks[2].free = 29;
  EXPECT_FALSE(find_stall(ranks, {.silent = 30, .behind = 0}));
  ranks[2].free = 31;
  EXPECT_TRUE(find_stall(ranks, {.silent = 30, .behind = 0}));
  // Another one's silence is not excused by it.
  ranks[2].free = 0;
  ranks[1].silent = 31;
  EXPECT_TRUE(find_stall(ranks, {.silent = 30, .behind = 0}));
}

// 0 waits for 1 in one group, and 1 for 2 in another: 2 is the reason.
TEST(Stall, TheReasonIsAtTheEndOfTheChain) {
  std::vector<Observed> ranks(3);
  ranks[0].progress.lanes = {lane(4, 3, 20, {0, 1})};
  ranks[1].progress.lanes = {lane(3, 3, 30, {0, 1}), lane(9, 8, 25, {1, 2})};
  ranks[2].progress.lanes = {lane(8, 8, 40, {1, 2})};
  const auto text = find_stall(ranks, kLimits);
  ASSERT_TRUE(text.has_value());
  EXPECT_EQ(text->find("rank 2 is behind"), 0u) << *text;
  ranks[2].progress.busy = "evaluation";
  EXPECT_FALSE(find_stall(ranks, kLimits));
}

TEST(Stall, ADeadlockNamesBothSides) {
  std::vector<Observed> ranks(2);
  ranks[0].progress.lanes = {lane(4, 3, 20, {0, 1}), lane(7, 7, 30, {1, 0})};
  ranks[1].progress.lanes = {lane(3, 3, 30, {0, 1}), lane(8, 7, 20, {1, 0})};
  const auto text = find_stall(ranks, kLimits);
  ASSERT_TRUE(text.has_value());
  EXPECT_EQ(text->find("ranks wait for each other: rank 0 is in all_reduce #4"), 0u) << *text;
  EXPECT_NE(text->find("rank 1 is in all_reduce #8"), std::string::npos) << *text;
}

TEST(Stall, AnotherKindInTheSamePlaceIsAMismatch) {
  std::vector<Observed> ranks = {rank_in(lane(5, 4, 20)), rank_in(lane(5, 4, 20)), rank_in(lane(5, 4, 20))};
  EXPECT_FALSE(find_stall(ranks, kLimits));
  ranks[1].progress.lanes[0].collective.kind = CollectiveKind::all_gather;
  const auto text = find_stall(ranks, kLimits);
  ASSERT_TRUE(text.has_value());
  EXPECT_NE(text->find("rank 1 is in all_gather #5"), std::string::npos) << *text;
}

TEST(Stall, OneWhoNeverSendsIsNamed) {
  std::vector<Observed> ranks = {rank_in(lane(0, 0, 0, {0, 1})), rank_in(lane(0, 0, 0, {0, 1}))};
  ranks[1].progress.lanes[0].message = {3, 2, CollectiveKind::receive, 20};
  const auto text = find_stall(ranks, kLimits);
  ASSERT_TRUE(text.has_value());
  EXPECT_EQ(*text, "rank 0 is behind: in no collective yet; rank 1 waits in receive #3 of 'replicate'");
}

// Every rank reads the verdict: it must not be as long as there are ranks.
TEST(Stall, OfThousandsNamesFew) {
  constexpr int kRanks = 4096;
  std::vector<int> everybody(kRanks);
  for (int rank = 0; rank < kRanks; ++rank) everybody[static_cast<std::size_t>(rank)] = rank;
  std::vector<Observed> ranks(kRanks, rank_in(lane(18, 17, 12, everybody)));
  ranks[1000] = rank_in(lane(17, 17, 12.3, everybody));
  const auto one = find_stall(ranks, kLimits);
  ASSERT_TRUE(one.has_value());
  EXPECT_EQ(one->find("rank 1000 is behind: in no collective; its last was all_reduce #17"), 0u) << *one;
  EXPECT_NE(one->find("ranks 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15 and 4079 others wait in all_reduce #18"),
            std::string::npos)
      << *one;
  EXPECT_LT(one->size(), 400u);
  for (int rank = 100; rank < 3000; ++rank) ranks[static_cast<std::size_t>(rank)].silent = 40;
  const auto many = find_stall(ranks, kLimits);
  ASSERT_TRUE(many.has_value());
  EXPECT_NE(many->find("; and 2884 others"), std::string::npos) << *many;
  EXPECT_LT(many->size(), 4000u);
}

TEST(Straggler, IsTheSlowestByItsOwnTime) {
  std::vector<Progress> ranks(4);
  for (Progress& rank : ranks) {
    rank.step = 3;
    rank.step_seconds = 1;
    rank.own_seconds = 0.5;
  }
  EXPECT_FALSE(find_straggler(ranks, 1.5));
  ranks[2].own_seconds = 0.9;
  ASSERT_TRUE(find_straggler(ranks, 1.5));
  EXPECT_EQ(find_straggler(ranks, 1.5)->rank, 2);
  EXPECT_FALSE(find_straggler(ranks, 2));
  // A few milliseconds more are anybody's.
  for (Progress& rank : ranks) rank.own_seconds = 0.01;
  ranks[2].own_seconds = 0.04;
  EXPECT_FALSE(find_straggler(ranks, 1.5));
  ranks[2].own_seconds = 0.08;
  EXPECT_TRUE(find_straggler(ranks, 1.5));
  ranks[0].step = -1;
  EXPECT_FALSE(find_straggler(ranks, 1.5));
}

// Not who is slow in one step, but who is step after step; and then once.
TEST(Straggler, IsNamedOnceAfterManyStepsInARow) {
  StragglerWatch watch(2);
  std::vector<Progress> ranks(3);
  const auto step = [&](std::int64_t number, std::size_t slow) {
    for (Progress& rank : ranks) rank.step = number, rank.own_seconds = 0.1;
    if (slow < ranks.size()) ranks[slow].own_seconds = 1;
    return watch.look(ranks);
  };
  std::int64_t number = 0;
  for (int i = 0; i < 30; ++i) EXPECT_FALSE(step(++number, 9)) << "all are alike";
  for (int i = 0; i < 30; ++i) EXPECT_FALSE(step(++number, static_cast<std::size_t>(i) % 3)) << "another one each time";
  for (int i = 0; i < kStragglerSteps - 1; ++i) EXPECT_FALSE(step(++number, 1));
  EXPECT_FALSE(step(number, 1)) << "a step is counted once, however often somebody looks";
  EXPECT_FALSE(step(++number, 9)) << "it was not, once";
  for (int i = 0; i < kStragglerSteps - 1; ++i) EXPECT_FALSE(step(++number, 1));
  const auto named = step(++number, 1);
  ASSERT_TRUE(named);
  EXPECT_EQ(named->rank, 1);
  for (int i = 0; i < 30; ++i) EXPECT_FALSE(step(++number, 1)) << "it was said";
}

TEST(Progress, TravelsWholeAndGarbageDoesNot) {
  ProgressBoard board;
  ProgressBoard::Lane& group = board.lane("shard", {1, 3});
  group.begin(7, CollectiveKind::all_gather);
  group.end(6, CollectiveKind::all_gather);
  group.begin(2, CollectiveKind::send);
  board.finish_step(4);
  const ProgressBoard::Busy busy(&board, "checkpoint");
  const auto lanes = decode_lanes(encode_lanes(board.snapshot()));
  ASSERT_TRUE(lanes.has_value());
  const std::string numbers = encode_numbers(board.snapshot());
  EXPECT_EQ(lanes_of(numbers), 1u);
  const auto back = decode_progress(numbers, *lanes);
  ASSERT_TRUE(back.has_value());
  ASSERT_EQ(back->lanes.size(), 1u);
  EXPECT_EQ(back->lanes[0].group, "shard");
  EXPECT_EQ(back->lanes[0].ranks.ranks(), (std::vector<int>{1, 3}));
  EXPECT_EQ(back->lanes[0].collective.begun, 7);
  EXPECT_EQ(back->lanes[0].collective.ended, 6);
  EXPECT_EQ(back->lanes[0].collective.kind, CollectiveKind::all_gather);
  EXPECT_EQ(back->lanes[0].message.begun, 2);
  EXPECT_EQ(back->step, 4);
  EXPECT_EQ(back->busy, "checkpoint");
  for (std::size_t length = 0; length < numbers.size(); ++length)
    EXPECT_FALSE(decode_progress(numbers.substr(0, length), *lanes)) << length;
  EXPECT_FALSE(decode_progress(numbers + "x", *lanes));
  EXPECT_FALSE(decode_progress(numbers, {}));
  for (const char* bad : {"", "{}x", "[1]", "[[1]]", "[[\"a\",\"1+2\"]]", "no"}) EXPECT_FALSE(decode_lanes(bad)) << bad;
}

// A sign of life is as long for a thousand ranks as for two.
TEST(Progress, SignsOfLifeDoNotGrowWithTheGroup) {
  const auto length = [](int ranks) {
    std::vector<int> members(static_cast<std::size_t>(ranks));
    for (int rank = 0; rank < ranks; ++rank) members[static_cast<std::size_t>(rank)] = 8 * rank + 3;
    ProgressBoard board;
    board.lane("replicate", members).begin(1, CollectiveKind::all_reduce);
    EXPECT_LT(encode_lanes(board.snapshot()).size(), 40u);
    return encode_numbers(board.snapshot()).size();
  };
  EXPECT_EQ(length(2), length(1024));
}

TEST(Members, AreTheSameInEveryForm) {
  for (const std::vector<int>& ranks :
       {std::vector<int>{}, {5}, {0, 1, 2, 3}, {7, 5, 3}, {0, 8, 16, 24}, {0, 1, 4, 5, 9}, {3, 3, 3}, {1, 0}}) {
    const Members members = ranks;
    EXPECT_EQ(members.ranks(), ranks);
    EXPECT_EQ(members.size(), static_cast<int>(ranks.size()));
    ASSERT_TRUE(Members::parse(members.text()).has_value()) << members.text();
    EXPECT_EQ(*Members::parse(members.text()), members);
  }
  EXPECT_EQ(Members(std::vector<int>{0, 8, 16, 24}).text(), "0+8x4");
  for (const char* bad : {"1", "1+2", "1+2x", "1+2x0", "1+2x-1", "0+1x9999999", "2147483647+2x2", "1+1x2,", "1+1x2;3+1x1"})
    EXPECT_FALSE(Members::parse(bad)) << bad;
}

TEST(Beats, TellWatchersHowFarEverybodyIs) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  Beats watcher(*store, 0, 3, 1), one(*store, 1, 3, 1);
  ProgressBoard board;
  board.lane("world", {0, 1, 2}).begin(4, CollectiveKind::barrier);
  one.publish(board.snapshot());
  // Rank 2 has not begun: the others are seen all the same.
  EXPECT_EQ(watcher.look(2)[1].progress.lanes.at(0).collective.begun, 4);
  EXPECT_TRUE(watcher.seen()[2].progress.lanes.empty());
  Beats two(*store, 2, 3, 1);
  two.publish({.busy = "checkpoint"});
  watcher.publish({});
  EXPECT_EQ(watcher.look(3)[2].progress.busy, "checkpoint");
  // A group that is made later is known when its numbers are.
  board.lane("shard", {1, 2}).begin(9, CollectiveKind::all_gather);
  one.publish(board.snapshot());
  const Progress& seen = watcher.look(4)[1].progress;
  ASSERT_EQ(seen.lanes.size(), 2u);
  EXPECT_EQ(seen.lanes[1].group, "shard");
  EXPECT_EQ(seen.lanes[1].ranks.ranks(), (std::vector<int>{1, 2}));
  EXPECT_EQ(seen.lanes[1].collective.begun, 9);
  // Whoever says the same again is alive; whoever says nothing is not.
  one.publish(board.snapshot());
  watcher.look(5);
  EXPECT_EQ(watcher.seen()[1].at, 5);
  EXPECT_EQ(watcher.seen()[2].at, 3);
}

TEST(GpuSharing, IsCountedByAllAlike) {
  // By rank: the host and the GPU.
  const std::vector<std::pair<std::string, std::string>> places = {{"a", "g0"}, {"a", "g1"}, {"b", "g2"},
                                                                   {"b", "g2"}, {"b", "g2"}, {"a", "g1"}};
  const std::vector<int> on_mine = {1, 2, 3, 3, 3, 2};
  const auto count = [&](std::size_t ranks) {
    const auto store = c10::make_intrusive<c10d::HashStore>();
    std::vector<GpuSharing> found(ranks);
    std::vector<std::thread> threads;
    for (std::size_t rank = 0; rank < ranks; ++rank)
      threads.emplace_back([&, rank] {
        found[rank] = count_gpu_sharing(*store, static_cast<int>(ranks), places[rank].first, places[rank].second);
      });
    for (std::thread& thread : threads) thread.join();
    return found;
  };
  const auto all = count(places.size());
  for (std::size_t rank = 0; rank < places.size(); ++rank) {
    EXPECT_EQ(all[rank].on_mine, on_mine[rank]) << rank;
    EXPECT_EQ(all[rank].most, 3);
    EXPECT_FALSE(all[rank].one_host);
  }
  for (const GpuSharing& one : count(2)) {
    EXPECT_EQ(one.most, 1);
    EXPECT_TRUE(one.one_host);
  }
}

TEST(Progress, WatchedCollectivesAreAskedByWhoeverLooks) {
  ProgressBoard board;
  ProgressBoard::Lane& group = board.lane("shard", {0, 1});
  std::atomic<int> over = 0, asked = 0;
  for (int number = 1; number <= 40; ++number) {
    group.begin(number, CollectiveKind::all_gather);
    group.watch(number, CollectiveKind::all_gather, [&over, &asked, number] {
      ++asked;
      return over >= number;
    });
  }
  group.begin(1, CollectiveKind::send);
  group.watch(1, CollectiveKind::send, []() -> bool { throw Error("the GPU is gone"); });
  const auto ended = [&] {
    board.look();
    return board.snapshot().lanes[0].collective.ended;
  };
  EXPECT_EQ(ended(), 0);
  for (const int upto : {1, 17, 39, 40}) {
    over = upto;
    asked = 0;
    EXPECT_EQ(ended(), upto);
    EXPECT_LE(asked, 7);  // not one question for each
  }
  EXPECT_EQ(board.snapshot().lanes[0].collective.begun, 40);
  EXPECT_EQ(board.snapshot().lanes[0].message.ended, 0);
}

// Without a watchdog nobody looks: what is kept must stay bounded, and what still runs must be kept.
TEST(Progress, WhatHasEndedIsForgottenWhereNobodyLooks) {
  ProgressBoard board;
  ProgressBoard::Lane& group = board.lane("shard", {0, 1});
  const auto alive = std::make_shared<int>();
  std::atomic<int> over = 0;
  const auto issue = [&](int number) {
    group.begin(number, CollectiveKind::all_gather);
    group.watch(number, CollectiveKind::all_gather, [&over, alive, number] { return over >= number; });
  };
  for (int number = 1; number <= 1000; ++number) issue(number);
  EXPECT_EQ(alive.use_count(), 1 + 1000);
  over = 100'000;
  for (int number = 1001; number <= 5000; ++number) issue(number);
  EXPECT_LT(alive.use_count(), 200);
  board.look();
  EXPECT_EQ(alive.use_count(), 1);
  EXPECT_EQ(board.snapshot().lanes[0].collective.ended, 5000);
}

TEST(Progress, OwnTimeIsWithoutWaiting) {
  ProgressBoard board;
  board.finish_step(0);
  {
    const ProgressBoard::Waiting waiting(&board);
    std::this_thread::sleep_for(50ms);
  }
  board.finish_step(1);
  const Progress progress = board.snapshot();
  EXPECT_GE(progress.step_seconds, 0.05);
  EXPECT_LE(progress.own_seconds, progress.step_seconds - 0.05);
}

// What others wait for a busy rank counts as little when it is done as before.
TEST(Watchdog, ARankThatWasBusyHasAllOfItsTimeAfterwards) {
  constexpr auto limit = 1s;
  using Clock = std::chrono::steady_clock;
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto board = std::make_shared<ProgressBoard>();
  board->lane("world", {0, 1}).begin(1, CollectiveKind::all_reduce);
  std::promise<Clock::time_point> stalled;
  const Watchdog watchdog(store, board,
                          {.size = 2,
                           .limits = {.silent = 600, .behind = 1},
                           .interval = 10ms,
                           .on_stall = [&](const std::string&) { stalled.set_value(Clock::now()); },
                           .log = Log::silent()});
  Beats other(*store, 1, 2, 0);
  Progress progress;
  progress.lanes = {Progress::Lane{.group = "world", .ranks = std::vector<int>{0, 1}}};
  progress.busy = "checkpoint";
  for (const auto until = Clock::now() + 2 * limit; Clock::now() < until; std::this_thread::sleep_for(10ms))
    other.publish(progress);
  const auto done = Clock::now();
  progress.busy.clear();
  other.publish(progress);
  auto stall = stalled.get_future();
  ASSERT_EQ(stall.wait_for(60s), std::future_status::ready);
  EXPECT_GE(stall.get() - done, limit);
}

// Ranks as threads over one store.
struct Ranks {
  c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::HashStore>();

  // What each of them threw.
  std::vector<std::string> check_in_all(std::vector<CheckIn> ranks) const {
    std::vector<std::string> errors(ranks.size());
    std::vector<std::thread> threads;
    for (std::size_t i = 0; i < ranks.size(); ++i)
      threads.emplace_back([&, i] {
        try {
          check_in(*store, ranks[i]);
        } catch (const Error& error) {
          errors[i] = error.what();
        }
      });
    for (std::thread& thread : threads) thread.join();
    return errors;
  }
};

TEST(CheckIn, AllThereIsFine) {
  for (const std::string& error :
       Ranks().check_in_all({{.rank = 0, .size = 3}, {.rank = 1, .size = 3}, {.rank = 2, .size = 3}}))
    EXPECT_EQ(error, "");
}

TEST(CheckIn, VersionsAreCompared) {
  const auto errors =
      Ranks().check_in_all({{.rank = 0, .size = 2}, {.rank = 1, .size = 2, .version = "bonfire 9.9.9, LibTorch 2.11.0"}});
  for (const std::string& error : errors) {
    EXPECT_NE(error.find("version"), std::string::npos) << error;
    EXPECT_NE(error.find("'" + CheckIn::own_version() + "'"), std::string::npos) << error;
    EXPECT_NE(error.find("'bonfire 9.9.9, LibTorch 2.11.0'"), std::string::npos) << error;
  }
}

// In whichever order they come: the second one of two may be too few for itself, and the first one not know that it was.
TEST(CheckIn, SizesAreComparedThoughARankIsMissing) {
  for (const bool zero_first : {true, false}) {
    const Ranks ranks;
    c10d::Store& store = *ranks.store;
    const auto arrive = [&](int rank, int size) {
      return std::async(std::launch::async, [&store, rank, size]() -> std::string {
        try {
          check_in(store, {.rank = rank, .size = size, .timeout = 60s, .report_every = 100ms, .log = Log::silent()});
          return "";
        } catch (const std::exception& error) {
          return error.what();
        }
      });
    };
    auto first = zero_first ? arrive(0, 3) : arrive(1, 2);
    while (!store.check({"check-in/arrived"})) std::this_thread::yield();  // a HashStore wakes nobody where it adds
    auto second = zero_first ? arrive(1, 2) : arrive(0, 3);
    for (auto* rank : {&first, &second}) {
      const std::string error = rank->get();
      EXPECT_NE(error.find("ranks differ in their size: rank 0"), std::string::npos) << error;
      EXPECT_NE(error.find("has '3', rank 1"), std::string::npos) << error;
    }
  }
}

TEST(CheckIn, SaysWhoIsMissingWhileItWaits) {
  std::mutex mutex;
  std::string said;
  const Log log([&](LogLevel, std::string_view text) {
    const std::lock_guard lock(mutex);
    said += std::string(text) + "\n";
  });
  const auto errors = Ranks().check_in_all({{.rank = 0, .size = 4, .timeout = 500ms, .report_every = 100ms, .log = log},
                                            {.rank = 1, .size = 4},
                                            {.rank = 3, .size = 4}});
  for (const std::string& error : errors) EXPECT_EQ(error, "have 3 of 4, missing rank 2 after 0.5 s");
  EXPECT_NE(said.find("have 3 of 4, missing rank 2"), std::string::npos) << said;
}

TEST(CheckIn, AMissingRankZeroIsNamedByTheOthers) {
  const auto errors =
      Ranks().check_in_all({{.rank = 1, .size = 3, .timeout = 100ms}, {.rank = 2, .size = 3, .timeout = 100ms}});
  for (const std::string& error : errors) EXPECT_NE(error.find("have 2 of 3, missing rank 0"), std::string::npos) << error;
}

TEST(CheckIn, ALateDoubleDoesNotDisturbTheOthers) {
  const Ranks ranks;
  ranks.check_in_all({{.rank = 0, .size = 2}, {.rank = 1, .size = 2}});
  const auto errors = ranks.check_in_all({{.rank = 1, .size = 2}});
  EXPECT_NE(errors[0].find("two processes say they are rank 1"), std::string::npos) << errors[0];
  EXPECT_EQ(ranks.store->get_to_str("check-in/verdict"), "agreed");
}

TEST(Limits, ComeFromTheEnvironment) {
  EXPECT_EQ(StallLimits::from({{"BONFIRE_HEARTBEAT_TIMEOUT", "2.5"}}).silent, 2.5);
  EXPECT_EQ(StallLimits::from({{"BONFIRE_STALL_TIMEOUT", "0"}}).behind, 0);
  EXPECT_EQ(StallLimits::from({}).behind, StallLimits{}.behind);
  EXPECT_THROW(StallLimits::from({{"BONFIRE_STALL_TIMEOUT", "soon"}}), ConfigError);
  EXPECT_THROW(StallLimits::from({{"BONFIRE_STALL_TIMEOUT", "-1"}}), ConfigError);
}

}  // namespace
}  // namespace bonfire::watchdog_test
