// What start-up and supervision of N ranks cost at the store, counted by the store itself while N ranks of this process
// speak to it, and compared with formulas in N. The formulas are those of docs/scale.md.
#include <sys/resource.h>

#include <barrier>
#include <exception>
#include <iostream>
#include <map>
#include <mutex>
#include <numeric>
#include <regex>
#include <set>
#include <thread>

#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "bonfire/base/error.h"
#include "bonfire/comm/beats.h"
#include "bonfire/comm/gpu_sharing.h"
#include "bonfire/comm/mesh.h"
#include "bonfire/comm/rendezvous.h"
#include "bonfire/comm/token_store.h"
#include "bonfire/comm/world.h"

namespace bonfire::scale_test {
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

// A store that knows the keys it was given.
class Listing : public c10d::HashStore {
 public:
  using c10d::HashStore::compareSet;
  using c10d::HashStore::set;
  void set(const std::string& key, const std::vector<std::uint8_t>& value) override {
    note(key);
    c10d::HashStore::set(key, value);
  }
  std::int64_t add(const std::string& key, std::int64_t value) override {
    note(key);
    return c10d::HashStore::add(key, value);
  }
  std::vector<std::uint8_t> compareSet(const std::string& key, const std::vector<std::uint8_t>& expected,
                                       const std::vector<std::uint8_t>& desired) override {
    note(key);
    return c10d::HashStore::compareSet(key, expected, desired);
  }
  std::set<std::string> keys() {
    const std::lock_guard lock(mutex_);
    return keys_;
  }

 private:
  void note(const std::string& key) {
    const std::lock_guard lock(mutex_);
    keys_.insert(key);
  }
  std::mutex mutex_;
  std::set<std::string> keys_;
};

// What a World of so many ranks calls its groups in the store: all, and the axes of a mesh with every second rank in one.
std::set<std::string> keys_of_groups(int size) {
  const auto store = c10::make_intrusive<Listing>();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank)
    threads.emplace_back([&, rank] {
      const World world = World::from_store(store, rank, size, {});
      const Mesh mesh = world.mesh({.replicate = size / 2, .shard = 2});
      for (const Axis axis : {Axis::replicate, Axis::shard}) mesh.group(axis).barrier().wait();
      world.group().barrier().wait();
    });
  for (std::thread& thread : threads) thread.join();
  return store->keys();
}

// However many members a group has, a key names them by a hash: N keys of N members' numbers each would be N squared.
TEST(Keys, OfAGroupAreAsLongForManyMembersAsForFew) {
  const auto begins = [](const std::string& key) { return key.starts_with("group "); };
  std::map<int, std::set<std::size_t>> lengths;
  for (const int size : {4, 16}) {
    for (const std::string& key : keys_of_groups(size)) {
      if (!begins(key)) continue;
      const std::string name = key.substr(0, key.find('/'));
      lengths[size].insert(name.size());
      EXPECT_TRUE(std::regex_match(name, std::regex("group [a-z ]* [0-9a-f]{16}"))) << key;
    }
  }
  EXPECT_EQ(lengths[4], lengths[16]);
  EXPECT_TRUE(lengths[16].contains(kGroup.size())) << "what is counted below has another length";
}

// N ranks from beginning to end, with the functions that real ranks call. Between two phases all wait for each other, so
// that each can be counted apart.
Costs run(int size) {
  StoreServer server({.token = "t", .log = Log::silent()});
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

// A sum over messages: a frame has 4 bytes of length, 1 of what it is, 8 for a number, and 4 more than its bytes for a text.
// Every key has the 10 bytes of "attempt 0/" in front, a group's 24 more.
Costs predicted(std::int64_t n, std::int64_t words, std::int64_t groups) {
  const std::int64_t digits = digits_up_to(n), hosts = (n + kRanksPerHost - 1) / kRanksPerHost;
  Costs costs;
  // Hello and a nonce (59 + 41), a proof and a proof (40 + 41).
  costs.connect = {4 * n, 181 * n};
  // Each rank: its words (compare_set: 50 + 2 words + the digits of its number), a count (56), a wait for the verdict (64)
  // and a get (82). The last one says that all have come (51). Rank 0 waits for that instead (1 more), looks for a verdict
  // (56), asks whether all are there (26 + 28 n + digits) and what they say (42 + (32 + words) n + digits), and gives the
  // verdict (64 + 51).
  costs.check_in = {8 * n + 12, (312 + 3 * words) * n + 3 * digits + 291};
  // Each rank: counts of the ranks on its GPU (twice 109), on its host (83), of hosts (73) and of those who have counted
  // (75); a wait (87); is a GPU crowded (75)? The first on a host counts it (73), and the last says that all are counted
  // (68). Then NCCL's 128 bytes: set (181) by one and read (213) by the others.
  costs.first_group = {16 * n + 2 * hosts + 2, 824 * n + 73 * hosts + 36};
  // Each rank: its numbers (167 + digits; 125 of them are numbers), and is there a verdict (56)? Two watchers read all of
  // them (42 + 157 n + digits each).
  costs.beat = {4 * n + 4, 537 * n + 3 * digits + 84};
  // The first time each also tells its groups (44 + groups + digits), and the watchers ask whether all have begun
  // (26 + 28 n + digits each) and read the groups (42 + (34 + groups) n + digits each).
  costs.first_beat = {6 * n + 12, (705 + 3 * groups) * n + 8 * digits + 220};
  // Each rank: a count (54) and a wait (66). The last says that all have left (49).
  costs.check_out = {4 * n + 2, 120 * n + 49};
  return costs;
}

// Whoever has begun is not asked for again, although another one never comes.
TEST(Beats, AskOneByOneOnlyForThoseWhoHaveNotBegun) {
  constexpr int kSize = 64;
  StoreServer server({.token = "t", .log = Log::silent()});
  const auto client = std::make_shared<StoreClient>(StoreClientOptions{.server = server.endpoint(), .token = "t"});
  const auto store = c10::make_intrusive<TokenStore>(client);
  for (int rank = 0; rank < kSize - 2; ++rank) Beats(*store, rank, kSize, 0).publish({});
  Beats watcher(*store, 0, kSize, 0);
  const auto requests = [&] {
    const std::int64_t before = server.traffic().requests;
    watcher.look(now_ns());
    return server.traffic().requests - before;
  };
  EXPECT_EQ(requests(), 1 + kSize + 1);
  EXPECT_EQ(requests(), 1 + 2 + 1);  // are both there? is each? and what do the others say?
  Beats(*store, kSize - 1, kSize, 0).publish({});
  EXPECT_EQ(requests(), 1 + 2 + 1);
  EXPECT_EQ(requests(), 1 + 1);
  Beats(*store, kSize - 2, kSize, 0).publish({});
  EXPECT_EQ(requests(), 1 + 1);
  EXPECT_EQ(requests(), 1);
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
}  // namespace bonfire::scale_test
