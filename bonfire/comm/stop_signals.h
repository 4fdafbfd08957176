#pragma once

#include <chrono>
#include <csignal>
#include <functional>
#include <mutex>
#include <thread>

#include "bonfire/base/api.h"
#include "bonfire/comm/socket.h"

namespace bonfire {

// What a rank hears of the end of its run: SIGINT, SIGTERM, SIGHUP and SIGUSR1, which ask for it in good order, and SIGURG,
// by which its launcher says that the run has failed (end_now).
BONFIRE_API sigset_t stop_requests();

// One request may arrive as several signals: timeout(1) signals its child and then the child's group, and systemd or scancel
// signal the launcher, which forwards it, and the ranks as well. A further SIGINT or SIGTERM is a second request only if it
// comes later than this after the first.
constexpr std::chrono::seconds kOneRequest{1};

// Requests to a rank that it end in good order. They are taken from here to the end of the process, so that none kills a
// rank that has yet to join the run, or one that is done; they are heard from here on where they were blocked. A second
// SIGINT or SIGTERM that is not forwarded by our launcher ends the process at once, and so does end_now(). A second SIGHUP
// does not: a terminal that goes away sends several. What was inherited as ignored stays ignored. For a process that is a
// rank and nothing else.
class BONFIRE_API StopSignals {
 public:
  // What is done about a request, on a thread of its own.
  using Answer = std::function<void()>;

  // `first` answers until somebody else does. REQUIRES: called once in a process, by its first thread.
  static StopSignals& take(Answer first);
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  // From now on `answer` is called, at once where there was a request before. Empty: requests are kept for the next one.
  // When this returns, the one before does not run any more.
  void answer_with(Answer answer);

  // Ends a rank whose run has failed, if it takes requests in this way; a program that does not know of this ignores it.
  static void end_now(pid_t rank);

 private:
  explicit StopSignals(Answer first);
  void listen();

  Socket read_;
  std::mutex mutex_;  // held while one answers
  Answer answer_;
  bool asked_ = false;
  std::thread thread_;
};

}  // namespace bonfire
