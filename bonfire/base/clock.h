#pragma once

#include <chrono>
#include <cstdint>

namespace bonfire {

using Nanoseconds = std::int64_t;

// Monotonic time of this machine, comparable between its processes.
inline Nanoseconds now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

inline double seconds_since(Nanoseconds start) { return static_cast<double>(now_ns() - start) * 1e-9; }

}  // namespace bonfire
