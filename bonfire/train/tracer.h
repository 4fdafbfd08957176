#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bonfire/base/api.h"
#include "bonfire/base/trace.h"
#include "bonfire/comm/world.h"
#include "bonfire/train/config.h"
#include "bonfire/train/run_file.h"

namespace bonfire {

// Notes what a rank computes and communicates during the steps that [train] trace_from and trace_steps name, with real
// timestamps: of the host on a CPU, of the device's streams on a GPU. After the last of them the notes of every eight ranks
// become one Chrome trace, which the first of the eight writes: trace.json, trace-8.json, trace-16.json and so on. In other
// steps it costs a comparison.
class BONFIRE_API Tracer {
 public:
  Tracer(const World& world, const Config& config, std::filesystem::path file);
  ~Tracer();

  void begin_step(std::int64_t step);
  // Collective at the last traced step.
  void end_step(std::int64_t step);

  // Whether the step that has begun is traced, and whether another one is to be.
  bool tracing() const { return tracing_; }
  bool traces(std::int64_t step) const { return step >= first_ && step <= last_; }

  // The time from its construction to its destruction, on the rank's compute track.
  class Phase;
  Phase phase(std::string name);

 private:
  struct Clock;  // of the device
  void add(const std::string& name, Nanoseconds start, Nanoseconds end);

  World world_;
  std::int64_t first_;
  std::int64_t last_;
  std::int64_t steps_;  // of the run
  DiskPolicy disk_;
  std::filesystem::path file_;
  bool tracing_ = false;
  Trace trace_;
  std::unique_ptr<Clock> clock_;
};

class BONFIRE_API Tracer::Phase {
 public:
  Phase(Tracer* tracer, std::string name);
  ~Phase();
  Phase(const Phase&) = delete;
  Phase& operator=(const Phase&) = delete;

 private:
  Tracer* tracer_;  // null: not traced
  std::string name_;
  std::int64_t start_ = 0;  // nanoseconds on a CPU, the number of an event on a GPU
};

// Ranks whose traces are in one file. However many there are, none has to hold or write more than so many of them.
inline constexpr int ranks_in_a_trace = 8;

// The texts of every `together` consecutive ranks, in their order, at the first of them; nothing elsewhere. Collective.
BONFIRE_API std::vector<std::string> gather_text(const Group& group, const std::string& text, int together);

}  // namespace bonfire
