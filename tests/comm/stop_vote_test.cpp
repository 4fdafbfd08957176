#include "bonfire/comm/stop_vote.h"

#include <array>
#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "bonfire/base/random.h"
#include "tests/comm/child.h"

namespace bonfire::stop_vote_test {
namespace {

using namespace std::chrono_literals;

// What holds ranks together within a step. False: somebody did not come.
class Meeting {
 public:
  explicit Meeting(int size) : size_(size) {}
  bool meet() {
    std::unique_lock lock(mutex_);
    const auto round = round_;
    if (++here_ == size_) {
      here_ = 0;
      ++round_;
      all_.notify_all();
      return true;
    }
    return all_.wait_for(lock, 20s, [&] { return round_ != round; });
  }

 private:
  int size_, here_ = 0;
  std::int64_t round_ = 0;
  std::mutex mutex_;
  std::condition_variable all_;
};

struct Ranks {
  Ranks(int size, std::chrono::milliseconds patience) : meeting(size) {
    for (int rank = 0; rank < size; ++rank)
      votes.push_back(std::make_unique<StopVote>(
          *store,
          StopVote::Options{
              .rank = rank, .size = size, .patience = patience, .failed = [this] { ++failed; }, .log = Log::silent()}));
  }
  // Steps until the vote says so.
  void run(int rank) {
    const auto at = static_cast<std::size_t>(rank);
    for (std::int64_t step = 1;; ++step) {
      if (!meeting.meet()) return;
      steps = step;
      if (!votes[at]->is_last(step)) continue;
      last[at] = step;
      return;
    }
  }

  c10::intrusive_ptr<c10d::HashStore> store = c10::make_intrusive<c10d::HashStore>();
  Meeting meeting;
  std::atomic<int> failed{0};  // votes
  std::vector<std::unique_ptr<StopVote>> votes;
  std::array<std::atomic<std::int64_t>, 4> last{};  // steps; 0: it goes on
  std::atomic<std::int64_t> steps{0};
};

TEST(StopVote, AllRanksEndAfterTheSameStepWheneverEachIsAsked) {
  const Random random(test::random_seed());
  std::uint64_t draw = 0;
  for (int round = 0; round < 40; ++round) {
    const int size = 1 + static_cast<int>(random.below(draw++, 4));
    Ranks ranks(size, 20s);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size; ++rank) {
      threads.emplace_back([&, rank] { ranks.run(rank); });
      threads.emplace_back([&, rank, delay = random.below(draw++, 20000)] {
        std::this_thread::sleep_for(std::chrono::microseconds(delay));
        ranks.votes[static_cast<std::size_t>(rank)]->ask();
      });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_GT(ranks.last[0], 0);
    for (int rank = 0; rank < size; ++rank) EXPECT_EQ(ranks.last[static_cast<std::size_t>(rank)], ranks.last[0]);
  }
}

TEST(StopVote, WhereNotAllAreAskedTheRunGoesOn) {
  Ranks ranks(2, 50ms);
  std::thread zero([&] { ranks.run(0); }), one([&] { ranks.run(1); });
  ranks.votes[0]->ask();
  const std::int64_t before = ranks.steps;
  EXPECT_TRUE(test::eventually([&] { return ranks.steps > before + 10; }));
  EXPECT_EQ(ranks.last[0] + ranks.last[1], 0);
  EXPECT_EQ(ranks.failed, 1) << "the rank that was asked hears of it";
  // Now both are, by somebody who has time: a vote may fail once more.
  EXPECT_TRUE(test::eventually([&] {
    ranks.votes[0]->ask();
    ranks.votes[1]->ask();
    return ranks.last[0] > 0 && ranks.last[1] > 0;
  }));
  zero.join();
  one.join();
  EXPECT_EQ(ranks.last[0], ranks.last[1]);
}

}  // namespace
}  // namespace bonfire::stop_vote_test
