#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "bonfire/base/log.h"

namespace bonfire {

// This process's stdout and stderr, for somebody who must not wait for whoever reads them: a pager that is not scrolled, a
// terminal that was halted with Ctrl-S. Threads of its own write; what does not fit into a bounded buffer is left out, and
// that is said when the reader goes on. A reader that is gone is no error. REQUIRES: SIGPIPE is ignored.
class Terminal {
 public:
  enum class Stream { out, err };

  // `kept_in`: where people find what was left out.
  explicit Terminal(std::string kept_in);
  // Waits for nothing: see drain().
  ~Terminal();
  Terminal(const Terminal&) = delete;
  Terminal& operator=(const Terminal&) = delete;

  void write(Stream stream, std::string text);
  // Messages go to `log`'s sink in their order among what is written to stderr, on the thread that writes there.
  Log relay(Log log);

  // Waits until all is written; no longer than `patience` where nothing moves, nor once `give_up` says so.
  void drain(std::chrono::milliseconds patience, const std::function<bool()>& give_up);
  // Why not all that was for stdout has gone there, as errno says it (EAGAIN: nobody read it in time); 0: it has.
  int stdout_error() const;

 private:
  class Lane;
  Lane& lane(Stream stream) const { return *(stream == Stream::out ? out_ : err_); }

  std::shared_ptr<Lane> out_, err_;  // one lane where both streams are the same file, so that order is kept
};

}  // namespace bonfire
