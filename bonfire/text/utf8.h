#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "bonfire/base/api.h"

// Text is UTF-8. What is not well-formed is read as others read it who replace what they cannot decode: each of its longest
// beginnings of a character, or else each byte, is U+FFFD.
namespace bonfire::utf8 {

inline constexpr std::string_view replacement = "\xEF\xBF\xBD";

// What a text begins with.
struct Start {
  std::size_t bytes = 0;
  bool well_formed = false;  // one character; otherwise bytes that one U+FFFD stands for
};

// REQUIRES: `text` is not empty.
BONFIRE_API Start start_of(std::string_view text);
BONFIRE_API bool well_formed(std::string_view text);
// `text` with U+FFFD in place of what is not well-formed.
BONFIRE_API std::string repaired(std::string_view text);

// How many of the last bytes begin a character that is not complete: 0 to 3.
BONFIRE_API std::size_t unfinished(std::string_view text);

// Bytes of the white space at the start and at the end of a well-formed text: Unicode's property White_Space.
BONFIRE_API std::size_t space_at_start(std::string_view text);
BONFIRE_API std::size_t space_at_end(std::string_view text);

}  // namespace bonfire::utf8
