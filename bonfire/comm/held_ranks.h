#pragma once

#include <map>
#include <string>

#include "bonfire/base/api.h"
#include "bonfire/base/log.h"
#include "bonfire/comm/store_errands.h"

namespace bonfire {

// Where a launcher says which of its ranks do not run because somebody holds them, or because they have ended and the run
// bears that, so that no watchdog calls them lost, nor those late who have waited for them. Its keys are those of stall.h.
// Nobody waits for the store.
class BONFIRE_API HeldRanks {
 public:
  struct Options {
    StoreClientOptions store;
    int attempt = 0;
    Log log{};
  };
  explicit HeldRanks(Options options);

  // `holder`: "a debugger (process 123)"; empty: nobody. The store is told where that is news, as often as it takes.
  void hold(int rank, const std::string& holder);
  // It has ended, for the so-manieth time, and comes back.
  void lost(int rank, int times);
  // It does not come back: whoever counts ranks, of which there are `size`, does without it.
  void lost_for_good(int rank, int times, int size);
  // Waits until the store knows; false at the limit.
  bool told(std::chrono::milliseconds most) { return errands_.done(most); }

 private:
  struct Hold {
    int number = 0;  // of the times that it was held
    std::string holder = {};
  };
  std::string prefix() const { return "attempt " + std::to_string(options_.attempt) + "/"; }

  Options options_;
  std::map<int, Hold> held_;
  bool warned_ = false;  // on the errands' thread
  StoreErrands errands_;
};

}  // namespace bonfire
