// What start-up and supervision of N ranks cost at the store, counted by the store itself while N ranks of this process
// speak to it, and compared with formulas in N. The formulas are those of docs/scale.md.
#include <sys/resource.h>

#include <barrier>
#include <exception>
#include <iostream>
#include <mutex>
#include <numeric>
#include <thread>

#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "bonfire/base/error.h"
#include "bonfire/comm/beats.h"
#include "bonfire/comm/gpu_sharing.h"
#include "bonfire/comm/rendezvous.h"
#include "bonfire/comm/token_store.h"

namespace bonfire {
namespace {

using namespace std::chrono_literals;

constexpr int kRounds = 3;        // of signs of life
constexpr int kRanksPerHost = 8;  // each on a GPU of its own
constexpr const char* kPrefix = "attempt 0";
const std::string kGroup = "group  0123456789abcdef";  // as long as any group's
const std::string kConfiguration(16, 'c');

// What went over the wire, both ways.
struct Cost {
  std::int64_t messages = 0;
  std::int64_t bytes = 0;
  bool operator==(const Cost&) const = default;
};
std::ostream& operator<<(std::ostream& out, const Cost& cost) {
  return out << cost.messages << " messages, " << cost.bytes << " bytes";
}

struct Costs {
  Cost connect, check_in, first_group, first_beat, beat, check_out;
  std::int64_t words = 0;   // bytes of what a rank says of itself when it checks in
  std::int64_t groups = 0;  // bytes of what it says of its groups
};

void allow_many_files() {
  rlimit limit{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
}

Progress progress_of(int size) {
  std::vector<int> everybody(static_cast<std::size_t>(size));
  std::iota(everybody.begin(), everybody.end(), 0);
  Progress progress;
  for (const char* name : {"world", "replicate"}) progress.lanes.push_back({.group = name, .ranks = everybody});
  return progress;
}

// N ranks from beginning to end, with the functions that real ranks call. Between two phases all wait for each other, so
// that each can be counted apart.
Costs run(int size) {
  StoreServer server({.token = "t", .log = Log::silent(), .most_strangers = 2 * size, .stranger_patience = 10min});
  Costs costs;
  StoreTraffic before;
  const auto counted = [&](Cost& cost) {
    const StoreTraffic now = server.traffic();
    cost = {now.requests + now.answers - before.requests - before.answers,
            now.request_bytes + now.answer_bytes - before.request_bytes - before.answer_bytes};
    before = now;
  };
  std::vector<Cost*> phases = {&costs.connect, &costs.check_in, &costs.first_group, &costs.first_beat};
  for (int round = 0; round < kRounds; ++round) phases.push_back(&costs.beat);
  phases.push_back(&costs.check_out);
  std::size_t phase = 0;
  std::vector<Cost> beats;
  std::barrier everybody(size, [&]() noexcept {
    Cost* cost = phases[phase++];
    counted(*cost);
    if (cost == &costs.beat) beats.push_back(*cost);
  });
  std::barrier published(size);

  std::mutex mutex;
  std::string error;
  const auto rank_of = [&](int rank) {
    auto client = std::make_shared<StoreClient>(
        StoreClientOptions{.server = server.endpoint(), .token = "t", .connect_timeout = 10min, .answer_timeout = 10min});
    const auto store = c10::make_intrusive<c10d::PrefixStore>(kPrefix, c10::make_intrusive<TokenStore>(client));
    everybody.arrive_and_wait();

    check_in(*store, {.rank = rank,
                      .size = size,
                      .version = "bonfire 0.1.0, LibTorch 2.11.0",
                      .configuration = kConfiguration,
                      .timeout = 10min,
                      .report_every = 10min});
    everybody.arrive_and_wait();

    // The first communicator as NCCL's: who shares a GPU, and its 128 bytes from rank 0 for all.
    const auto group = c10::make_intrusive<c10d::PrefixStore>(kGroup, store);
    const GpuSharing sharing =
        count_gpu_sharing(*group, size, fmt::format("host-{:05}", rank / kRanksPerHost), fmt::format("{:032}", rank));
    EXPECT_EQ(sharing.most, 1);
    if (rank == 0)
      group->set("0", std::vector<std::uint8_t>(128, 7));
    else
      EXPECT_EQ(group->get("0").size(), 128u);
    everybody.arrive_and_wait();

    Beats beats(*store, rank, size, now_ns());
    const Progress progress = progress_of(size);
    const auto beat = [&] {
      beats.publish(progress);
      EXPECT_FALSE(store->check({"watchdog/verdict"}));
      published.arrive_and_wait();
      if (rank < 2) {
        EXPECT_EQ(beats.look(now_ns()).size(), static_cast<std::size_t>(size));
        for (const Beats::Seen& seen : beats.seen()) EXPECT_EQ(seen.progress.lanes.size(), 2u);
      }
      everybody.arrive_and_wait();
    };
    for (int round = 0; round <= kRounds; ++round) beat();

    check_out(*store, size);
    everybody.arrive_and_wait();
    if (rank == 0) {
      costs.words = static_cast<std::int64_t>(store->get("check-in/rank/0").size());
      costs.groups = static_cast<std::int64_t>(encode_lanes(progress).size());
    }
  };
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank)
    threads.emplace_back([&, rank] {
      try {
        rank_of(rank);
      } catch (const std::exception& thrown) {
        // The others wait for this one at the next barrier.
        std::cerr << "rank " << rank << ": " << thrown.what() << std::endl;
        std::abort();
      }
    });
  for (std::thread& thread : threads) thread.join();
  for (const Cost& beat : beats) EXPECT_EQ(beat, costs.beat);  // no round costs more than another
  return costs;
}

// The decimal digits of 0, 1, ..., n - 1 together: keys end in a rank's number.
std::int64_t digits_up_to(std::int64_t n) {
  std::int64_t digits = 1;  // of 0
  for (std::int64_t first = 1; first < n; first *= 10)
    digits += (std::min(n, first * 10) - first) * static_cast<std::int64_t>(std::to_string(first).size());
  return digits;
}

// Each line is a sum over messages: a frame has 4 bytes of length, 1 of what it is, 8 for a number, and 4 more than its
// bytes for a text. Every key has the 10 bytes of "attempt 0/" in front.
Costs predicted(std::int64_t n, std::int64_t words, std::int64_t groups) {
  const std::int64_t digits = digits_up_to(n);
  Costs costs;
  // Hello and nonce, proof and proof.
  costs.connect = {4 * n, (59 + 41 + 40 + 41) * n};
  // All: own words (compare_set), a count (add), a wait and a get of the verdict. Rank 0 waits for the last to arrive
  // instead, looks for a verdict, reads all words, and decides.
  costs.check_in = {8 * n + 12, (50 + 2 * words) * n + digits + (43 + 13) * n + (59 + 5) * n + (59 + 23) * n  // all
                                    + (60 - 59)                                      // rank 0 waits for another key
                                    + (43 + 13)                                      // is there a verdict?
                                    + (13 + 28 * n + digits + 13)                    // are all there?
                                    + (29 + 28 * n + digits + 13 + (4 + words) * n)  // their words
                                    + (49 + 15) + 2 * (46 + 5)};                     // verdict; gathered, said twice
  // In the group's part of the store: 34 bytes in front of each key. Counts of the rank's GPU (twice), host, hosts and of
  // ranks; a wait; is any GPU crowded? Then NCCL's 128 bytes.
  const std::int64_t hosts = (n + kRanksPerHost - 1) / kRanksPerHost, front = 34;
  const auto add = [&](std::int64_t key) { return 4 + 1 + 4 + front + key + 8 + 13; };
  const auto get = [&](std::int64_t key) { return 4 + 1 + 8 + 8 + 8 + 4 + front + key; };
  costs.first_group = {14 * n + 2 * hosts + 2 + 2 * n,
                       (2 * add(13 + 32) + add(9 + 10) + add(9) + add(11)) * n + add(9) * hosts + (get(15) + 5) * n +
                           (4 + 1 + 8 + 4 + front + 11 + 13) * n + (4 + 1 + 4 + front + 15 + 4 + 1 + 5) +
                           (get(1) + 4 + 1 + 8 + 4 + 128) * (n - 1) + (4 + 1 + 4 + front + 1 + 4 + 128 + 5)};
  // Every rank: its numbers (125 bytes for two groups), and whether there is a verdict. Two watchers read all numbers.
  const std::int64_t numbers = 8 + 33 + 2 * 42;
  const std::int64_t publish = (4 + 1 + 4 + 24 + 4 + numbers + 5) * n + digits + (43 + 13) * n;
  const std::int64_t look = 29 + 28 * n + digits + 13 + (4 + numbers) * n;
  costs.beat = {4 * n + 4, publish + 2 * look};
  // The first time: its groups as well, and the watchers ask whether all have begun, and read the groups.
  costs.first_beat = {costs.beat.messages + 2 * n + 8, costs.beat.bytes + (4 + 1 + 4 + 26 + 4 + groups + 5) * n + digits +
                                                           2 * (13 + 28 * n + digits + 13) +
                                                           2 * (29 + 30 * n + digits + 13 + (4 + groups) * n)};
  costs.check_out = {4 * n + 2,
                     (4 + 1 + 4 + 24 + 8 + 13) * n + (4 + 1 + 24 + 4 + 28 + 5) * n + (4 + 1 + 4 + 28 + 4 + 3 + 5)};
  return costs;
}

class Scale : public ::testing::TestWithParam<int> {};

TEST_P(Scale, StartAndSupervisionCostWhatTheFormulaSays) {
  allow_many_files();
  const Costs real = run(GetParam());
  const Costs formula = predicted(GetParam(), real.words, real.groups);
  EXPECT_EQ(real.connect, formula.connect);
  EXPECT_EQ(real.check_in, formula.check_in);
  EXPECT_EQ(real.first_group, formula.first_group);
  EXPECT_EQ(real.first_beat, formula.first_beat);
  EXPECT_EQ(real.beat, formula.beat);
  EXPECT_EQ(real.check_out, formula.check_out);
  const auto show = [](int n, const char* how, const Costs& costs) {
    std::cout << fmt::format("| {} | {} |", n, how);
    for (const Cost& cost :
         {costs.connect, costs.check_in, costs.first_group, costs.first_beat, costs.beat, costs.check_out})
      std::cout << fmt::format(" {} | {} |", cost.messages, cost.bytes);
    std::cout << "\n";
  };
  show(GetParam(), "counted", real);
  if (GetParam() == 1024) show(16'384, "formula", predicted(16'384, real.words + 1, real.groups + 2));
}

INSTANTIATE_TEST_SUITE_P(Ranks, Scale, ::testing::Values(64, 256, 1024),
                         [](const auto& info) { return std::to_string(info.param); });

}  // namespace
}  // namespace bonfire
