#pragma once

#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "bonfire/base/api.h"
#include "bonfire/base/clock.h"

namespace bonfire {

// Something that happened on one track (a stream, a stage, the loader's thread) of one rank.
struct Span {
  std::string name;
  std::string category;  // "compute", "communication", "data", ...
  std::string track;
  Nanoseconds start = 0;
  Nanoseconds end = 0;
  std::int64_t bytes = 0;  // 0: not said
};

// Collects spans of one rank, from any of its threads, and writes them in the Chrome trace format that Perfetto opens.
class BONFIRE_API Trace {
 public:
  explicit Trace(int rank = 0) : rank_(rank) {}

  void add(Span span);
  std::vector<Span> spans() const;
  int rank() const { return rank_; }

  // One JSON event per line, without the enclosing list: the ranks' events are joined into one file.
  std::string events() const;
  static std::string file(const std::vector<std::string>& events_of_ranks);

 private:
  int rank_;
  mutable std::mutex mutex_;
  std::vector<Span> spans_;
};

// Adds the time between its construction and its destruction to a trace. A null trace costs nothing.
class BONFIRE_API TraceScope {
 public:
  TraceScope(Trace* trace, std::string name, std::string category, std::string track);
  ~TraceScope();
  TraceScope(const TraceScope&) = delete;
  TraceScope& operator=(const TraceScope&) = delete;

 private:
  Trace* trace_;
  Span span_;
};

}  // namespace bonfire
