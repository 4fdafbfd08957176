#include "bonfire/base/name_pattern.h"

#include <algorithm>

namespace bonfire {

bool fits_part(std::string_view pattern, std::string_view part) {
  const auto star = pattern.find('*');
  if (star == std::string_view::npos) return pattern == part;
  if (part.substr(0, star) != pattern.substr(0, star) || part.size() < star) return false;
  const auto rest = pattern.substr(star + 1);
  for (std::size_t at = star; at <= part.size(); ++at)
    if (fits_part(rest, part.substr(at))) return true;
  return false;
}

bool begins_with_parts(std::string_view pattern, std::string_view name) {
  while (true) {
    const auto end = pattern.find('.'), stop = name.find('.');
    if (!fits_part(pattern.substr(0, end), name.substr(0, stop))) return false;
    if (end == std::string_view::npos) return true;
    if (stop == std::string_view::npos) return false;
    pattern.remove_prefix(end + 1);
    name.remove_prefix(stop + 1);
  }
}

bool ends_with_parts(std::string_view pattern, std::string_view name) {
  const auto dots = [](std::string_view text) { return std::count(text.begin(), text.end(), '.'); };
  auto too_many = dots(name) - dots(pattern);
  if (too_many < 0) return false;
  for (; too_many > 0; --too_many) name.remove_prefix(name.find('.') + 1);
  return begins_with_parts(pattern, name);
}

}  // namespace bonfire
