#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <string_view>

#include "bonfire/base/log.h"
#include "bonfire/comm/socket.h"
#include "bonfire/comm/terminal.h"

namespace bonfire {

// Where a rank's output goes: whole lines to its file, and the same, prefixed, to the terminal. Where the file cannot be
// written, a warning says so, and what comes after that is written again where it can, below a line about what is missing.
class RankOutput {
 public:
  struct Options {
    std::string file;
    std::string prefix;  // of each line on the terminal
    bool echo = true;
    bool raw = false;             // to the terminal as it comes, so that a progress bar can draw over itself
    std::size_t remembered = 20;  // last lines
    Log log{};
  };
  // Throws Error where the file cannot be opened. `terminal` must outlive it.
  RankOutput(Options options, Terminal& terminal);

  // Takes what is there now, but not more than fits into a pipe several times: a rank that never stops writing keeps nobody
  // from hearing others. A pipe whose other end is closed is closed.
  void take(Socket& out, Socket& err);
  // The rank has ended: what it left without a newline is its last line.
  void finish();
  // For the file alone.
  void note(std::string_view text);

  const std::deque<std::string>& last_lines() const { return last_lines_; }

 private:
  // False once the other end is closed.
  bool take(const Socket& pipe, Terminal::Stream stream, std::string& unfinished);
  void line(std::string_view text, Terminal::Stream stream);
  void transient(std::string_view text, Terminal::Stream stream);
  void to_file(std::string_view text);
  bool write_line(std::string_view text);

  Options options_;
  Terminal* terminal_;
  Socket file_;
  std::int64_t missing_ = 0;  // lines that could not be written since the last one that could
  std::string unfinished_out_, unfinished_err_;
  std::deque<std::string> last_lines_;
};

}  // namespace bonfire
