#pragma once

#include <optional>
#include <string>
#include <vector>

#include "bonfire/base/api.h"
#include "bonfire/comm/environment.h"
#include "bonfire/comm/progress.h"

namespace bonfire {

// A rank as a watchdog last saw it.
struct Observed {
  Progress progress;
  double silent = 0;  // seconds since its last sign of life
  bool held = false;  // by somebody, such as a debugger: others wait for it as long as it takes
};

struct StallLimits {
  double silent = 30;   // a rank from which nothing was heard for so long is lost; 0: never
  double behind = 300;  // a rank for which others have waited so long is behind; 0: never

  // BONFIRE_HEARTBEAT_TIMEOUT and BONFIRE_STALL_TIMEOUT, in seconds; 0 switches one off. Throws ConfigError.
  BONFIRE_API static StallLimits from(const Variables& variables);
};

// In the store of an attempt: who holds a rank that does not run, such as a debugger. Nobody calls it late meanwhile.
BONFIRE_API std::string held_key(int rank);

// Who holds the others up, and where everybody is, in one line; nothing where all is well. `ranks` is indexed by rank. A
// rank that says it is busy holds nobody up, and neither does one that itself waits for another.
BONFIRE_API std::optional<std::string> find_stall(const std::vector<Observed>& ranks, const StallLimits& limits);

struct Straggler {
  int rank = 0;
  double own_seconds = 0;     // its own time in a step
  double median_seconds = 0;  // of all ranks
};

// The slowest rank of the last step by its own time, where that is more than `factor` times the median, and so much more
// (50 ms) that it is not another program's doing.
BONFIRE_API std::optional<Straggler> find_straggler(const std::vector<Progress>& ranks, double factor);

}  // namespace bonfire
