#include "bonfire/comm/stop_signals.h"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <atomic>

#include "bonfire/base/system_error.h"
#include "bonfire/comm/signal_events.h"

namespace bonfire {
namespace {

constexpr std::array kSignals = {SIGINT, SIGTERM, SIGHUP, SIGUSR1};
// What comes with a SIGTERM that asks for no good order.
constexpr int kEndNow = 0x626f6e;

// A signal handler can be given nothing: what it needs must be where it can find it.
std::atomic<int> stop_end{-1};

void note(int signal, siginfo_t* about, void*) {
  const int error = errno;
  if (signal == SIGTERM && about->si_code == SI_QUEUE && about->si_value.sival_int == kEndNow) {
    ::signal(SIGTERM, SIG_DFL);
    raise(SIGTERM);  // when this handler returns
    return;
  }
  if (signal != SIGUSR1) ::signal(signal, SIG_DFL);
  const char byte = 1;
  [[maybe_unused]] const ssize_t written = write(stop_end.load(std::memory_order_relaxed), &byte, 1);
  errno = error;
}

}  // namespace

StopSignals::StopSignals(std::function<void()> asked) {
  int ends[2];
  require_system(pipe2(ends, O_CLOEXEC) == 0, "cannot make a pipe for signals");
  read_ = Socket(ends[0]);
  write_ = Socket(ends[1]);
  stop_end = write_.fd();
  {
    const SignalsBlocked signals;  // in the new thread
    thread_ = std::thread([this, asked = std::move(asked)] {
      char byte = 0;
      while (read(read_.fd(), &byte, 1) == 1 && byte != 0) asked();
    });
  }
  struct sigaction action {};
  action.sa_sigaction = note;
  action.sa_flags = SA_RESTART | SA_SIGINFO;
  for (const int signal : kSignals) {
    sigaction(signal, nullptr, &before_[signal]);
    if (before_[signal].sa_handler != SIG_IGN) sigaction(signal, &action, nullptr);
  }
}

StopSignals::~StopSignals() {
  for (const int signal : kSignals) sigaction(signal, &before_[signal], nullptr);
  const char end = 0;
  [[maybe_unused]] const ssize_t written = write(write_.fd(), &end, 1);
  thread_.join();
  stop_end = -1;
}

void StopSignals::end_now(pid_t rank) { sigqueue(rank, SIGTERM, {.sival_int = kEndNow}); }

}  // namespace bonfire
