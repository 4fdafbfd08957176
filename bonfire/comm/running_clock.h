#pragma once

#include <condition_variable>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "bonfire/base/clock.h"

namespace bonfire {

// Time in which this process ran. What it spends stopped (SIGSTOP, a debugger, a suspended machine) does not count: a thread
// of its own notices that it has not run either.
class RunningClock {
 public:
  RunningClock();
  ~RunningClock();
  RunningClock(const RunningClock&) = delete;
  RunningClock& operator=(const RunningClock&) = delete;

  Nanoseconds now() const;
  // How much of the last `seconds` the process ran.
  double running(double seconds) const;

 private:
  Nanoseconds stopped_since(Nanoseconds then, Nanoseconds now) const;

  mutable std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<std::pair<Nanoseconds, Nanoseconds>> stops_;  // from, to
  Nanoseconds ticked_ = now_ns();
  bool ending_ = false;
  std::thread thread_;
};

}  // namespace bonfire
