#include "bonfire/comm/crash.h"

#include <execinfo.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <cstdio>
#include <cstring>

namespace bonfire {
namespace {

constexpr std::array kSignals = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT};

// A signal handler can be given nothing: what it needs must be where it can find it.
char rank_text[16];
std::array<struct sigaction, kSignals.size()> before;
alignas(16) char handler_stack[1 << 16];

void say(const char* text) { [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, text, std::strlen(text)); }

// Only calls that are safe in a signal handler.
void report(int signal) {
  // First of all: where even the stack cannot be walked, the second signal ends the process.
  for (std::size_t i = 0; i < kSignals.size(); ++i) sigaction(kSignals[i], &before[i], nullptr);
  const char* name = sigabbrev_np(signal);
  say("bonfire: rank ");
  say(rank_text);
  say(" crashed with SIG");
  say(name != nullptr ? name : "?");
  say("; its stack:\n");
  void* frames[64];
  const int count = backtrace(frames, 64);
  backtrace_symbols_fd(frames, count, STDERR_FILENO);
  raise(signal);
}

}  // namespace

CrashReport::CrashReport(int rank) {
  std::snprintf(rank_text, sizeof rank_text, "%d", rank);
  // The first call loads a library, which a handler must not do.
  void* frame;
  backtrace(&frame, 1);
  // A stack of its own: the reason may be that the usual one is full.
  stack_t stack{};
  stack.ss_sp = handler_stack;
  stack.ss_size = sizeof handler_stack;
  sigaltstack(&stack, nullptr);
  struct sigaction action {};
  action.sa_handler = report;
  action.sa_flags = SA_ONSTACK | SA_NODEFER;
  for (std::size_t i = 0; i < kSignals.size(); ++i) sigaction(kSignals[i], &action, &before[i]);
}

CrashReport::~CrashReport() {
  for (std::size_t i = 0; i < kSignals.size(); ++i) sigaction(kSignals[i], &before[i], nullptr);
  stack_t none{};
  none.ss_flags = SS_DISABLE;
  sigaltstack(&none, nullptr);
}

}  // namespace bonfire
