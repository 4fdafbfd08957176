#include "bonfire/comm/stop_signals.h"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdlib>

#include "bonfire/base/clock.h"
#include "bonfire/base/system_error.h"
#include "bonfire/comm/signal_events.h"

namespace bonfire {
namespace {

constexpr std::array kSignals = {SIGINT, SIGTERM, SIGHUP, SIGUSR1};
// Says that the run has failed: nobody asks for good order any more. Programs that do not know of it ignore this signal, so
// they get the SIGTERM of their group alone.
constexpr int kEndSignal = SIGURG;
constexpr int kEndNow = 0x626f6e;  // comes with it

// A signal handler can be given nothing: what it needs must be where it can find it.
std::atomic<int> stop_end{-1};
std::atomic<Nanoseconds> first_request{0};  // SIGINT or SIGTERM; 0: none yet
std::atomic<pid_t> launcher{-1};            // of ours; -1: none

void end_at_once(int, siginfo_t* about, void*) {
  if (about->si_code != SI_QUEUE || about->si_value.sival_int != kEndNow) return;
  ::signal(SIGTERM, SIG_DFL);
  raise(SIGTERM);
  // It is blocked where a SIGTERM that came before waits for this handler to end.
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGTERM);
  pthread_sigmask(SIG_UNBLOCK, &set, nullptr);
}

void note_request(int signal, siginfo_t* about, void*) {
  const int error = errno;
  // Our launcher has forwarded what may have come directly as well; where it is asked twice, it kills.
  if ((signal == SIGINT || signal == SIGTERM) && about->si_pid != launcher.load(std::memory_order_relaxed)) {
    const Nanoseconds now = now_ns();
    Nanoseconds first = 0;
    if (!first_request.compare_exchange_strong(first, now) && now - first > std::chrono::nanoseconds(kOneRequest).count()) {
      ::signal(signal, SIG_DFL);
      raise(signal);  // it is blocked until this handler returns
    }
  }
  const char byte = 1;
  [[maybe_unused]] const ssize_t written = write(stop_end.load(std::memory_order_relaxed), &byte, 1);
  errno = error;
}

}  // namespace

sigset_t stop_requests() {
  sigset_t set;
  sigemptyset(&set);
  for (const int signal : kSignals) sigaddset(&set, signal);
  sigaddset(&set, kEndSignal);
  return set;
}

StopSignals& StopSignals::take(Answer first) {
  // Never destroyed: a request may come while the process ends.
  static StopSignals& signals = *new StopSignals(std::move(first));
  return signals;
}

StopSignals::StopSignals(Answer first) : answer_(std::move(first)) {
  int ends[2];
  require_system(pipe2(ends, O_CLOEXEC) == 0, "cannot make a pipe for signals");
  read_ = Socket(ends[0]);
  stop_end = ends[1];
  {
    const SignalsBlocked signals;  // in the new thread
    thread_ = std::thread([this] { listen(); });
  }
  struct sigaction action {};
  action.sa_flags = SA_RESTART | SA_SIGINFO;
  action.sa_sigaction = end_at_once;
  sigaction(kEndSignal, &action, nullptr);
  if (std::getenv("BONFIRE_LAUNCHER") != nullptr) launcher = getppid();
  action.sa_sigaction = note_request;
  for (const int signal : kSignals) {
    struct sigaction before {};
    sigaction(signal, nullptr, &before);
    if (before.sa_handler != SIG_IGN) sigaction(signal, &action, nullptr);
  }
  const sigset_t requests = stop_requests();
  pthread_sigmask(SIG_UNBLOCK, &requests, nullptr);
}

void StopSignals::listen() {
  char byte = 0;
  while (read(read_.fd(), &byte, 1) == 1) {
    const std::lock_guard lock(mutex_);
    asked_ = true;
    if (answer_) answer_();
  }
}

void StopSignals::answer_with(Answer answer) {
  const std::lock_guard lock(mutex_);
  answer_ = std::move(answer);
  if (asked_ && answer_) answer_();
}

void StopSignals::end_now(pid_t rank) { sigqueue(rank, kEndSignal, {.sival_int = kEndNow}); }

}  // namespace bonfire
