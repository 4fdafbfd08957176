#pragma once

#include <csignal>
#include <functional>
#include <thread>

#include "bonfire/base/api.h"
#include "bonfire/comm/socket.h"

namespace bonfire {

// While it lives, SIGINT, SIGTERM, SIGHUP and SIGUSR1 ask a rank to end in good order: `asked` is called on a thread of its
// own. A second SIGINT, SIGTERM or SIGHUP ends the process at once, and so does a SIGTERM by which a launcher says that the
// run has failed. What was inherited as ignored stays ignored. For a process that is a rank and nothing else.
class BONFIRE_API StopSignals {
 public:
  explicit StopSignals(std::function<void()> asked);
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  // Sends SIGTERM to a rank whose run has failed.
  static void end_now(pid_t rank);

 private:
  Socket read_, write_;
  struct sigaction before_[32];
  std::thread thread_;
};

}  // namespace bonfire
