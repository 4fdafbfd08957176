#include "tests/support/ranks.h"

#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include <ATen/Parallel.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

namespace bonfire::testing {

void run_ranks(int ranks, const std::function<void(World&)>& body, WorldOptions options) {
  auto store = c10::make_intrusive<c10d::HashStore>();
  if (options.timeout > std::chrono::seconds(30)) options.timeout = std::chrono::seconds(30);
  options.local_size = ranks;
  std::exception_ptr first;
  std::mutex mutex;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank)
    threads.emplace_back([&, rank] {
      try {
        auto mine = options;
        mine.local_rank = rank;
        at::set_num_threads(1);  // the ranks are the threads; pools of their own would only be in each other's way
        World world = World::from_store(store, rank, ranks, mine);
        body(world);
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (!first) first = std::current_exception();
      }
    });
  for (auto& thread : threads) thread.join();
  if (first) std::rethrow_exception(first);
}

}  // namespace bonfire::testing
