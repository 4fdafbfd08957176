#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>

namespace bonfire::testing {

// Lets threads wait for what others do.
class Gate {
 public:
  void add() {
    const std::lock_guard lock(mutex_);
    ++count_;
    changed_.notify_all();
  }
  int count() const {
    const std::lock_guard lock(mutex_);
    return count_;
  }
  // Whether so many were added within `limit`.
  bool await(int count, std::chrono::milliseconds limit = std::chrono::seconds(30)) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, limit, [&] { return count_ >= count; });
  }

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  int count_ = 0;
};

}  // namespace bonfire::testing
