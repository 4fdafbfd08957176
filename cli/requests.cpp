#include "cli/requests.h"

#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstring>

#include "bonfire/comm/stop_signals.h"
#include "cli/commands.h"

namespace bonfire::cli {
namespace {

// A signal handler can be given nothing: what it needs must be where it can find it.
std::atomic<bool> launched{false};

void end(int signal) {
  if (launched) {
    if (signal == SIGUSR1) return;
    ::signal(signal, SIG_DFL);
    raise(signal);  // when this handler returns
    return;
  }
  say_stopped_before_the_start();
  _exit(kStoppedAfterSaving);
}

}  // namespace

void say_stopped_before_the_start() {
  // Safe in a signal handler.
  const char* words = "bonfire: stopped on request before the first step; nothing was saved\n";
  [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, words, std::strlen(words));
}

void outlive_readers() {
  struct sigaction before {
  }, action{};
  action.sa_handler = [](int) {};  // not SIG_IGN, which others would inherit
  action.sa_flags = SA_RESTART;
  sigaction(SIGPIPE, nullptr, &before);
  if (before.sa_handler != SIG_IGN) sigaction(SIGPIPE, &action, nullptr);
}

void let_requests_through() {
  const sigset_t requests = stop_requests();
  pthread_sigmask(SIG_UNBLOCK, &requests, nullptr);
}

void end_on_request() {
  for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGUSR1}) {
    struct sigaction before {
    }, action{};
    action.sa_handler = end;
    sigaction(signal, nullptr, &before);
    if (before.sa_handler != SIG_IGN) sigaction(signal, &action, nullptr);
  }
  let_requests_through();
}

void launcher_hears_requests() { launched = true; }

}  // namespace bonfire::cli
