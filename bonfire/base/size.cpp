#include "bonfire/base/size.h"

#include <array>
#include <charconv>
#include <cmath>

#include <fmt/format.h>

namespace bonfire {
namespace {

constexpr std::array units{"B", "KiB", "MiB", "GiB", "TiB", "PiB"};

}  // namespace

std::string format_bytes(std::int64_t bytes) {
  double value = static_cast<double>(bytes);
  std::size_t unit = 0;
  while (std::abs(value) >= 1024 && unit + 1 < units.size()) value /= 1024, ++unit;
  return unit == 0 ? fmt::format("{} B", bytes) : fmt::format("{:.2f} {}", value, units[unit]);
}

std::optional<std::int64_t> parse_bytes(std::string_view text) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value, std::chars_format::fixed);
  if (error != std::errc()) return std::nullopt;
  std::string_view unit(end, static_cast<std::size_t>(text.data() + text.size() - end));
  if (unit.starts_with(' ')) unit.remove_prefix(1);
  if (unit.empty()) unit = units.front();
  for (const char* name : units) {
    if (unit == name) {
      const bool whole = value >= 0 && value < 0x1p63 && value == std::floor(value);
      return whole ? std::optional(static_cast<std::int64_t>(value)) : std::nullopt;
    }
    value *= 1024;
  }
  return std::nullopt;
}

std::string exact_bytes(std::int64_t bytes) {
  std::size_t unit = 0;
  for (; bytes != 0 && bytes % 1024 == 0 && unit + 1 < units.size(); ++unit) bytes /= 1024;
  return fmt::format("{}{}", bytes, units[unit]);
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
