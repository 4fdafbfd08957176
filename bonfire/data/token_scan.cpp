#include "bonfire/data/token_scan.h"

#include <algorithm>

#include "bonfire/base/error.h"

namespace bonfire {
namespace {

template <class T>
std::uint64_t largest(const std::byte* data, std::uint64_t count) {
  const auto* values = reinterpret_cast<const T*>(data);
  T found = 0;
  for (std::uint64_t at = 0; at < count; ++at) found = std::max(found, values[at]);
  return found;
}

}  // namespace

std::uint64_t largest_unsigned(const std::byte* data, std::uint64_t count, std::uint64_t width) {
  switch (width) {
    case 1: return largest<std::uint8_t>(data, count);
    case 2: return largest<std::uint16_t>(data, count);
    case 4: return largest<std::uint32_t>(data, count);
    case 8: return largest<std::uint64_t>(data, count);
    default: fail("values of {} bytes cannot be scanned", width);
  }
}

}  // namespace bonfire
