#pragma once

#include <sys/types.h>

#include <csignal>
#include <string>
#include <vector>

#include "bonfire/comm/environment.h"
#include "bonfire/comm/socket.h"

namespace bonfire {

// One rank as its launcher sees it: a process in a process group of its own, whose output comes back through two pipes, and
// which the kernel kills when the launcher dies.
struct RankProcess {
  int rank = 0;
  pid_t pid = -1;
  Socket out, err;
  Socket end;  // readable once it has ended; none where the kernel (before 5.3) has no such thing
};

struct RankProgram {
  const std::vector<std::string>& words;  // found along PATH
  const Variables& variables;             // these and no others
  const sigset_t& ignored;                // signals that it starts with as ignored
  bool takes_signals = false;             // it starts with requests to stop blocked, and unblocks them when it can answer
};

// Throws ConfigError where it cannot be run.
RankProcess start_rank(int rank, const RankProgram& program);

// What holds a process that does not run: "a debugger (process 123)". Empty: nothing of that kind.
std::string held_by(pid_t process);

}  // namespace bonfire
