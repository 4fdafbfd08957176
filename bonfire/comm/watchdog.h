#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include <c10/util/intrusive_ptr.h>

#include "bonfire/base/api.h"
#include "bonfire/base/log.h"
#include "bonfire/comm/progress.h"
#include "bonfire/comm/stall.h"

namespace c10d {
class Store;
}

namespace bonfire {

struct WatchdogOptions {
  int rank = 0;
  int size = 1;
  StallLimits limits = {};
  std::chrono::milliseconds interval = std::chrono::milliseconds(0);  // of signs of life; 0: a tenth of the shortest limit
  double straggler_factor = 2;  // a rank slower than so many medians, step after step, is named; 0: never
  // Called once, on the watchdog's thread, with one line that names who is behind and where. The default only logs it.
  std::function<void(const std::string&)> on_stall = {};
  Log log{};
};

// Publishes this rank's progress through the store, and, on the two lowest ranks, looks at everybody's. The first stall that
// is found is told to all ranks, each of which calls its `on_stall`.
class BONFIRE_API Watchdog {
 public:
  Watchdog(c10::intrusive_ptr<c10d::Store> store, std::shared_ptr<ProgressBoard> board, WatchdogOptions options);
  // This rank leaves in good order.
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

 private:
  class Loop;
  std::unique_ptr<Loop> loop_;
};

}  // namespace bonfire
