#pragma once

#include <cstddef>
#include <cstdint>

namespace bonfire {

// The largest of `count` unsigned values of `width` bytes (1, 2, 4 or 8), as fast as memory gives them. 0 for none.
// REQUIRES: data is aligned to width.
std::uint64_t largest_unsigned(const std::byte* data, std::uint64_t count, std::uint64_t width);

}  // namespace bonfire
