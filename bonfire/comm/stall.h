#pragma once

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <limits>
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
  // Seconds since somebody, such as a debugger, held it last; 0: still. Others wait for it as long as it takes, and what
  // they wait counts from then on.
  double free = std::numeric_limits<double>::infinity();
  bool gone = false;  // for good: nobody waits for it
};

struct StallLimits {
  double silent = 30;   // a rank from which nothing was heard for so long is lost; 0: never
  double behind = 300;  // a rank for which others have waited so long is behind; 0: never

  // BONFIRE_HEARTBEAT_TIMEOUT and BONFIRE_STALL_TIMEOUT, in seconds; 0 switches one off. Throws ConfigError.
  BONFIRE_API static StallLimits from(const Variables& variables);

  // `silent`, for clocks; no more than thirty years.
  std::chrono::milliseconds silence() const {
    return std::chrono::milliseconds(static_cast<std::int64_t>(std::ceil(std::min(silent, 1e9) * 1e3)));
  }
};

// In the store of an attempt: who holds a rank that does not run, such as a debugger. Nobody calls it late meanwhile. The
// text, which stays when the rank goes on, differs each time that it is held: a watcher notices what was over before it
// looked.
BONFIRE_API std::string held_key(int rank);
inline constexpr const char* kAnyHeld = "watchdog/held/any";               // there once any was
BONFIRE_API std::string hold_text(int number, const std::string& holder);  // no holder: it goes on
BONFIRE_API bool says_held(const std::string& text);

// The same of ranks that have ended and whose loss the run bears (LostRanks): how often each was lost, and how often it has
// come back. One that is lost for good does not.
BONFIRE_API std::string lost_key(int rank);
BONFIRE_API std::string returned_key(int rank);
inline constexpr const char* kAnyLost = "lost/any";  // there once any was
BONFIRE_API std::string lost_text(int times, bool for_good);
BONFIRE_API bool lost_for_good(const std::string& text);

// Who holds the others up, and where everybody is, in one line; nothing where all is well. `ranks` is indexed by rank. A
// rank that says it is busy holds nobody up, and neither does one that itself waits for another. Nobody is behind within
// the limit after any rank was held: all may have waited for that one.
BONFIRE_API std::optional<std::string> find_stall(const std::vector<Observed>& ranks, const StallLimits& limits);

struct Straggler {
  int rank = 0;
  double own_seconds = 0;     // its own time in a step
  double median_seconds = 0;  // of all ranks
};

// The slowest rank of the last step by its own time, where that is more than `factor` times the median, and so much more
// (50 ms) that it is not another program's doing.
BONFIRE_API std::optional<Straggler> find_straggler(const std::vector<Progress>& ranks, double factor);

// Steps in a row in which a rank must be the slowest before it is worth a word.
inline constexpr int kStragglerSteps = 10;

// Who is slowest step after step, not only now and then.
class BONFIRE_API StragglerWatch {
 public:
  explicit StragglerWatch(double factor) : factor_(factor) {}
  // How the ranks stand now. The straggler, once, where it has been the same one for so many steps.
  std::optional<Straggler> look(const std::vector<Progress>& ranks);

 private:
  double factor_;
  int rank_ = -1;
  std::int64_t step_ = -1;
  int steps_ = 0;
};

}  // namespace bonfire
