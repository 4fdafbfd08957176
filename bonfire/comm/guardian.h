#pragma once

#include <sys/types.h>

#include <set>

#include "bonfire/comm/socket.h"

namespace bonfire {

// A small process that outlives the launcher by a moment: when the launcher is killed, it kills the ranks' process groups,
// and so also what the ranks themselves had started. Where it is killed itself, another takes its place.
// REQUIRES: used from one thread; SIGPIPE is ignored.
class Guardian {
 public:
  static constexpr int kMost = 4096;  // groups

  Guardian();
  ~Guardian();
  Guardian(const Guardian&) = delete;
  Guardian& operator=(const Guardian&) = delete;

  void watch(pid_t group);
  // To be called while the group's first process has not been waited for: its number may belong to another one afterwards.
  void forget(pid_t group);
  // Starts another one where this one has ended. True: it had.
  bool renew();

 private:
  void start();
  void tell(pid_t group);

  std::set<pid_t> groups_;
  Socket pipe_;
  pid_t pid_ = -1;
};

}  // namespace bonfire
