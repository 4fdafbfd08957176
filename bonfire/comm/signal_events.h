#pragma once

#include <csignal>

#include "bonfire/comm/socket.h"

namespace bonfire {

inline bool is_stop_request(int signal) { return signal == SIGINT || signal == SIGTERM || signal == SIGHUP; }

// While it lives, requests of the system and of people (SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGTSTP, SIGCONT) are events of a
// poll loop. They come by handlers, so it does not matter which thread of the process the kernel gives a signal to. What was
// ignored when the process was started, as SIGHUP is under nohup, stays ignored. A reader of this process's output that goes
// away (SIGPIPE) ends nothing, and children can be waited for even where SIGCHLD was inherited as ignored.
// REQUIRES: one at a time in a process.
class SignalEvents {
 public:
  SignalEvents();
  ~SignalEvents();
  SignalEvents(const SignalEvents&) = delete;
  SignalEvents& operator=(const SignalEvents&) = delete;

  int fd() const { return read_.fd(); }
  // The next one that has come; 0: none.
  int next() const;
  // It comes again: for one that only those who follow can answer.
  void put_back(int signal) const;
  // The signals that this process was started with as ignored, other than SIGCHLD: what it starts gets them so, too.
  const sigset_t& ignored() const { return ignored_; }
  // Stops this process as SIGTSTP does; returns when it goes on.
  void stop_here() const;

 private:
  Socket read_, write_;
  sigset_t mask_before_;
  sigset_t ignored_;
  struct sigaction before_[32];
};

// No signal is delivered to the calling thread while it lives.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

}  // namespace bonfire
