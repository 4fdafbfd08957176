#pragma once

#include <sys/types.h>

#include <deque>
#include <fstream>
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
};

// Starts `program` (found along PATH) with exactly these variables. Throws ConfigError where it cannot be run.
RankProcess start_rank(int rank, const std::vector<std::string>& program, const Variables& variables);

// A small process that outlives the launcher by a moment: when the launcher is killed, it kills the ranks' process groups,
// and so also what the ranks themselves had started. REQUIRES: used from one thread.
class Guardian {
 public:
  Guardian();
  ~Guardian();
  Guardian(const Guardian&) = delete;
  Guardian& operator=(const Guardian&) = delete;

  void watch(pid_t group);
  void forget(pid_t group);

 private:
  void tell(pid_t group);

  Socket pipe_;
  pid_t pid_ = -1;
};

// Where a rank's output goes: whole lines to its file, and the same, prefixed, to the terminal.
class RankOutput {
 public:
  struct Options {
    std::string file;    // empty: none
    std::string prefix;  // of each line on the terminal
    bool echo = true;
    bool raw = false;             // to the terminal as it comes, so that a progress bar can draw over itself
    std::size_t remembered = 20;  // last lines
  };
  explicit RankOutput(Options options);

  // Takes what is there now. False once the other end is closed.
  bool take(const Socket& pipe, int terminal, std::string& unfinished);
  void take_all(RankProcess& process);
  // What came without a newline at the end.
  void finish();
  // For the file alone.
  void note(std::string_view text);

  std::string unfinished_out, unfinished_err;
  const std::deque<std::string>& last_lines() const { return last_lines_; }

 private:
  void line(std::string_view text, int terminal);
  void transient(std::string_view text, int terminal);

  Options options_;
  std::ofstream file_;
  std::deque<std::string> last_lines_;
};

}  // namespace bonfire
