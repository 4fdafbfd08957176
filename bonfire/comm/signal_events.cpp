#include "bonfire/comm/signal_events.h"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <atomic>

#include "bonfire/base/system_error.h"

namespace bonfire {
namespace {

constexpr std::array kEvents = {SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGTSTP, SIGCONT};

// A signal handler can be given nothing: what it needs must be where it can find it.
std::atomic<int> signals_end{-1};

void note(int signal) {
  const int error = errno;
  const auto byte = static_cast<unsigned char>(signal);
  [[maybe_unused]] const ssize_t written = write(signals_end.load(std::memory_order_relaxed), &byte, 1);
  errno = error;
}

struct sigaction action_of(void (*handler)(int)) {
  struct sigaction action {};
  action.sa_handler = handler;
  action.sa_flags = SA_RESTART;
  return action;
}

}  // namespace

SignalEvents::SignalEvents() {
  int ends[2];
  require_system(pipe2(ends, O_CLOEXEC | O_NONBLOCK) == 0, "cannot make a pipe for signals");
  read_ = Socket(ends[0]);
  write_ = Socket(ends[1]);
  int nobody = -1;
  require(signals_end.compare_exchange_strong(nobody, write_.fd()),
          "this process launches ranks already: one launch at a time");

  sigemptyset(&ignored_);
  sigset_t wanted;
  sigemptyset(&wanted);
  for (int signal = 1; signal < 32; ++signal) {
    sigaction(signal, nullptr, &before_[signal]);
    if (before_[signal].sa_handler == SIG_IGN && signal != SIGCHLD) sigaddset(&ignored_, signal);
  }
  for (const int signal : kEvents) {
    sigaddset(&wanted, signal);
    const struct sigaction action = action_of(note);
    if (!sigismember(&ignored_, signal)) sigaction(signal, &action, nullptr);
  }
  const struct sigaction ignore = action_of(SIG_IGN), usual = action_of(SIG_DFL);
  sigaction(SIGPIPE, &ignore, nullptr);
  sigaction(SIGCHLD, &usual, nullptr);
  // They may be blocked in every thread, if whoever started this process did so.
  pthread_sigmask(SIG_UNBLOCK, &wanted, &mask_before_);
}

SignalEvents::~SignalEvents() {
  for (const int signal : kEvents) sigaction(signal, &before_[signal], nullptr);
  for (const int signal : {SIGPIPE, SIGCHLD}) sigaction(signal, &before_[signal], nullptr);
  pthread_sigmask(SIG_SETMASK, &mask_before_, nullptr);
  signals_end.store(-1);
}

int SignalEvents::next() const {
  unsigned char signal = 0;
  return read(read_.fd(), &signal, 1) == 1 ? signal : 0;
}

void SignalEvents::put_back(int signal) const { note(signal); }

void SignalEvents::stop_here() const {
  // The kernel's own way, which does not stop a process that nobody could continue.
  const struct sigaction usual = action_of(SIG_DFL), ours = action_of(note);
  sigaction(SIGTSTP, &usual, nullptr);
  raise(SIGTSTP);
  sigaction(SIGTSTP, &ours, nullptr);
}

}  // namespace bonfire
