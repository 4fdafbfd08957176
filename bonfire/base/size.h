#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "bonfire/base/api.h"

namespace bonfire {

// REQUIRES: multiple > 0.
constexpr std::int64_t round_up(std::int64_t value, std::int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

BONFIRE_API std::string format_bytes(std::int64_t bytes);  // "12.34 GiB"
// Of "2GiB", "1.5 MiB", "4096" and "4096 B"; nothing where it is no such text, negative, or more than an int64 holds.
BONFIRE_API std::optional<std::int64_t> parse_bytes(std::string_view text);
// A text that parse_bytes reads back to the same number: "2GiB", "1025B".
BONFIRE_API std::string exact_bytes(std::int64_t bytes);
BONFIRE_API std::string format_count(std::int64_t count);  // "12,345"
BONFIRE_API std::string format_seconds(double seconds);    // "1.23 ms", "4 min 05 s"

}  // namespace bonfire
