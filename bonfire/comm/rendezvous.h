#pragma once

#include <chrono>
#include <string>

#include "bonfire/base/api.h"
#include "bonfire/base/error.h"
#include "bonfire/base/log.h"

namespace c10d {
class Store;
}

namespace bonfire {

class StoreClient;

// What a rank says of itself when it arrives.
struct CheckIn {
  int rank = 0;
  int size = 1;
  std::string version = own_version();  // must be the same on all ranks
  std::string configuration = {};       // a text that must be the same on all ranks: best a hash of the configuration
  std::chrono::milliseconds timeout = std::chrono::minutes(5);
  std::chrono::milliseconds report_every = std::chrono::seconds(5);  // "have 3 of 4, missing rank 2"
  Log log{};

  BONFIRE_API static std::string own_version();  // Bonfire's and LibTorch's
};

// Collective: returns when all ranks are there and agree. Throws Error on every rank that is there where one is missing at
// the timeout (and says which), two have one number (and names both), or they differ in size, version or configuration (and
// names both values). REQUIRES: keys under "check-in/" of the store are not used by anybody else.
BONFIRE_API void check_in(c10d::Store& store, const CheckIn& self);

// For a rank that was lost and is back: the others have met and go on. Throws ConfigError where it is not like them, and
// names both values.
BONFIRE_API void check_in_again(c10d::Store& store, const CheckIn& self);

// Somebody asked the run to stop before all ranks were there.
class BONFIRE_API StoppedOnRequest : public Error {
 public:
  using Error::Error;
};

// Ends the meeting in check_in(), on all ranks, with StoppedOnRequest, unless all have agreed before. From any thread, and
// over a store of its own, for some stores have no time for others while one waits.
BONFIRE_API void call_off_check_in(c10d::Store& store);

// Collective: returns when all `size` ranks have called it, so that none takes its connections down while another still
// needs them. It waits without end: a watchdog says who is missing.
BONFIRE_API void check_out(c10d::Store& store, int size);
// The same of a rank that may be lost on its way out, and come back: it is counted once.
BONFIRE_API void check_out_once(c10d::Store& store, int rank, int size);
// Counts a rank that is lost for good, so that nobody waits for it. `prefix`: of the keys of its attempt.
BONFIRE_API void check_out_lost(StoreClient& store, const std::string& prefix, int rank, int size);

}  // namespace bonfire
