#pragma once

#include <cstdint>
#include <string>

#include "bonfire/base/api.h"

namespace bonfire {

// REQUIRES: multiple > 0.
constexpr std::int64_t round_up(std::int64_t value, std::int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

BONFIRE_API std::string format_bytes(std::int64_t bytes);  // "12.34 GiB"
BONFIRE_API std::string format_count(std::int64_t count);  // "12,345"
BONFIRE_API std::string format_seconds(double seconds);    // "1.23 ms", "4 min 05 s"

}  // namespace bonfire
