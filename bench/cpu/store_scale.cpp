// What start-up and supervision of many ranks say to the job's store: messages and bytes, counted while ranks of this
// process check in, give signs of life, and check out. Each is a thread; the store is in memory and counts as the wire
// would.
//
//   build/bench_store_scale [RANKS...]
#include <atomic>
#include <barrier>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <thread>
#include <vector>

#include <fmt/format.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "bonfire/comm/progress.h"
#include "bonfire/comm/rendezvous.h"
#include "bonfire/comm/watchdog.h"

namespace {

using namespace std::chrono_literals;
using Bytes = std::vector<std::uint8_t>;
using Keys = std::vector<std::string>;

// A frame has 4 bytes of length, 1 of what it is, 8 for a number, and 4 more than its bytes for a text (store_wire.h).
class CountingStore : public c10d::HashStore {
 public:
  using c10d::HashStore::compareSet;
  using c10d::HashStore::set;
  using c10d::HashStore::wait;

  void set(const std::string& key, const Bytes& value) override {
    if (key.find("watchdog/rank/") != std::string::npos) ++beats;
    count(13 + key.size() + value.size() + 5);
    c10d::HashStore::set(key, value);
  }
  Bytes compareSet(const std::string& key, const Bytes& expected, const Bytes& desired) override {
    Bytes there = c10d::HashStore::compareSet(key, expected, desired);
    count(17 + key.size() + expected.size() + desired.size() + 9 + there.size());
    return there;
  }
  Bytes get(const std::string& key) override {
    Bytes value = c10d::HashStore::get(key);
    count(33 + key.size() + 17 + value.size());
    return value;
  }
  std::int64_t add(const std::string& key, std::int64_t value) override {
    count(17 + key.size() + 13);
    return c10d::HashStore::add(key, value);
  }
  bool check(const Keys& keys) override {
    count(13 + of(keys) + 13);
    return c10d::HashStore::check(keys);
  }
  void wait(const Keys& keys, const std::chrono::milliseconds& timeout) override {
    count(29 + of(keys) + 5);
    c10d::HashStore::wait(keys, timeout);
  }
  std::vector<Bytes> multiGet(const Keys& keys) override {
    auto values = c10d::HashStore::multiGet(keys);
    std::size_t bytes = 29 + of(keys) + 13;
    for (const Bytes& value : values) bytes += 4 + value.size();
    count(bytes);
    return values;
  }

  std::atomic<std::int64_t> messages = 0, bytes = 0, beats = 0;

 private:
  static std::size_t of(const Keys& keys) {
    std::size_t bytes = 0;
    for (const std::string& key : keys) bytes += 4 + key.size();
    return bytes;
  }
  void count(std::size_t both_ways) {
    messages += 2;
    bytes += static_cast<std::int64_t>(both_ways);
  }
};

struct Cost {
  std::int64_t messages, bytes;
};

void measure(int size) {
  const auto store = c10::make_intrusive<CountingStore>();
  const auto now = [&] { return Cost{store->messages, store->bytes}; };
  Cost arrived{}, watched{}, stopped{}, left{};
  std::int64_t beats = 0;
  int phase = 0;
  std::barrier everybody(size, [&]() noexcept {
    Cost* costs[] = {&arrived, &watched, &stopped, &left};
    *costs[phase++] = now();
    if (phase == 2) beats = store->beats;
  });
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank)
    threads.emplace_back([&, rank] {
      const auto own = c10::make_intrusive<c10d::PrefixStore>("attempt 0", store);
      bonfire::check_in(*own, {.rank = rank,
                               .size = size,
                               .configuration = std::string(16, 'c'),
                               .timeout = 10min,
                               .report_every = 10min,
                               .log = bonfire::Log::silent()});
      everybody.arrive_and_wait();
      std::vector<int> members(static_cast<std::size_t>(size));
      std::iota(members.begin(), members.end(), 0);
      auto board = std::make_shared<bonfire::ProgressBoard>();
      for (const char* name : {"world", "replicate"})
        board->lane(name, members).begin(1, bonfire::CollectiveKind::all_reduce);
      {
        const bonfire::Watchdog watchdog(own, board,
                                         {.rank = rank,
                                          .size = size,
                                          .limits = {.silent = 3600, .behind = 3600},
                                          .interval = 2000ms,
                                          .log = bonfire::Log::silent()});
        std::this_thread::sleep_for(15s);
        everybody.arrive_and_wait();
      }
      everybody.arrive_and_wait();
      bonfire::check_out(*own, size);
      everybody.arrive_and_wait();
    });
  for (std::thread& thread : threads) thread.join();
  const double rounds = static_cast<double>(beats) / size;
  fmt::print("| {} | {} | {} | {:.0f} | {:.0f} | {} | {} |\n", size, arrived.messages, arrived.bytes,
             static_cast<double>(watched.messages - arrived.messages) / rounds,
             static_cast<double>(watched.bytes - arrived.bytes) / rounds, left.messages - stopped.messages,
             left.bytes - stopped.bytes);
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  fmt::print(
      "| ranks | check in: messages | bytes | a round of signs of life: messages | bytes | check out: messages | bytes |\n"
      "|---|---|---|---|---|---|---|\n");
  std::vector<int> sizes;
  for (int i = 1; i < argc; ++i) sizes.push_back(std::atoi(argv[i]));
  if (sizes.empty()) sizes = {64, 256, 1024};
  for (const int size : sizes) measure(size);
}
