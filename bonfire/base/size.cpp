#include "bonfire/base/size.h"

#include <array>
#include <cmath>

#include <fmt/format.h>

namespace bonfire {

std::string format_bytes(std::int64_t bytes) {
  static constexpr std::array units{"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  double value = static_cast<double>(bytes);
  std::size_t unit = 0;
  while (std::abs(value) >= 1024 && unit + 1 < units.size()) value /= 1024, ++unit;
  return unit == 0 ? fmt::format("{} B", bytes) : fmt::format("{:.2f} {}", value, units[unit]);
}

std::string format_count(std::int64_t count) {
  std::string grouped;
  const std::string digits = std::to_string(std::abs(count));
  for (std::size_t at = 0; at < digits.size(); ++at) {
    if (at && (digits.size() - at) % 3 == 0) grouped += ',';
    grouped += digits[at];
  }
  return count < 0 ? "-" + grouped : grouped;
}

std::string format_seconds(double seconds) {
  if (seconds < 1e-3) return fmt::format("{:.1f} us", seconds * 1e6);
  if (seconds < 1) return fmt::format("{:.2f} ms", seconds * 1e3);
  if (seconds < 60) return fmt::format("{:.1f} s", seconds);
  const auto whole = static_cast<std::int64_t>(std::llround(seconds));
  if (whole < 3600) return fmt::format("{} min {:02} s", whole / 60, whole % 60);
  return fmt::format("{} h {:02} min", whole / 3600, whole % 3600 / 60);
}

}  // namespace bonfire
