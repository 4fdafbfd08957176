#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <optional>
#include <thread>

namespace bonfire::cli {

// How long a rank has to end once it is asked to: checkpoint.grace. Any thread may call it.
class Grace {
 public:
  // `late` is called once, on a thread of its own, where the time is over.
  Grace(std::chrono::duration<double> length, std::function<void()> late);
  ~Grace();  // it has ended in time
  Grace(const Grace&) = delete;
  Grace& operator=(const Grace&) = delete;

  // It was asked to; later requests do not begin the time anew.
  void begin();
  // It does not end after all.
  void cancel();

 private:
  void watch(std::stop_token stop);

  const std::chrono::duration<double> length_;
  const std::function<void()> late_;
  std::mutex mutex_;
  std::condition_variable_any changed_;
  std::optional<std::chrono::steady_clock::time_point> until_;
  std::jthread thread_;  // last: it uses all of the above
};

}  // namespace bonfire::cli
