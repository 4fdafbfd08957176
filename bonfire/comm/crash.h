#pragma once

#include "bonfire/base/api.h"

namespace bonfire {

// While it lives, a crash of this process (SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT) leaves the rank, the signal and the
// stack of the crashing thread on stderr before it takes its course. For a process that is a rank and nothing else: the
// library itself touches no signals.
class BONFIRE_API CrashReport {
 public:
  explicit CrashReport(int rank);
  ~CrashReport();
  CrashReport(const CrashReport&) = delete;
  CrashReport& operator=(const CrashReport&) = delete;
};

}  // namespace bonfire
