#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "bonfire/base/api.h"
#include "bonfire/base/clock.h"
#include "bonfire/train/metrics.h"

namespace bonfire {

// "step: 10  loss: 4.12345  grad_norm: 1.2345  memory: 12.34GiB  tps: 12,345", and what else there is to say.
BONFIRE_API std::string step_line(const StepMetrics& metrics);

// What a person sees of a run. On a terminal one line that is drawn again in place, at most ten times a second, and the last
// one stays; in a log one line every `every` steps, and one for the first and the last.
class BONFIRE_API ProgressLine {
 public:
  struct Options {
    std::int64_t steps = 0;       // the last step's number
    std::int64_t first_step = 0;  // steps that an earlier run has done
    std::int64_t every = 1;
    bool terminal = false;
    std::function<int()> columns = [] { return 80; };  // of the terminal, now
    std::function<void(std::string_view)> write;
    std::function<Nanoseconds()> now = now_ns;
  };

  // The columns of the terminal that is open as `file`; 80 where it does not say.
  static int columns_of(int file);
  // Writes to stderr, as a bar where that is a terminal.
  static Options to_stderr();

  explicit ProgressLine(Options options);
  // Leaves what is drawn, with the end of its line.
  ~ProgressLine();
  ProgressLine(const ProgressLine&) = delete;
  ProgressLine& operator=(const ProgressLine&) = delete;

  void step_done(const StepMetrics& metrics);
  // Takes the bar off the screen until the next step, so that something else can be printed.
  void clear();

 private:
  std::string bar(const StepMetrics& metrics, int columns) const;

  Options options_;
  Nanoseconds start_;
  Nanoseconds drawn_at_ = 0;
  bool drawn_ = false;
  std::size_t width_ = 0;  // of what is drawn
  bool began_ = false;
};

}  // namespace bonfire
