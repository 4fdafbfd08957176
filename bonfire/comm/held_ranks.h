#pragma once

#include <map>
#include <optional>
#include <string>

#include "bonfire/base/log.h"
#include "bonfire/comm/store_client.h"

namespace bonfire {

// Where a launcher says which of its ranks do not run because somebody holds them, so that no watchdog calls them lost.
// Its keys are those of held_key (stall.h).
class HeldRanks {
 public:
  struct Options {
    StoreClientOptions store;
    int attempt = 0;
    Log log{};
  };
  explicit HeldRanks(Options options) : options_(std::move(options)) {}

  // `holder`: "a debugger (process 123)"; empty: nobody. Asks the store only where that is news.
  void hold(int rank, const std::string& holder);

 private:
  Options options_;
  std::map<int, std::string> held_;
  std::optional<StoreClient> client_;
};

}  // namespace bonfire
