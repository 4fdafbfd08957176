#include "bonfire/comm/members.h"

#include <charconv>
#include <cstdint>

#include <fmt/format.h>

namespace bonfire {

Members::Members(const std::vector<int>& ranks) {
  for (const int rank : ranks) {
    Run* last = runs_.empty() ? nullptr : &runs_.back();
    if (last != nullptr && last->count == 1) last->step = rank - last->first;
    if (last != nullptr && rank == last->first + last->step * last->count)
      ++last->count;
    else
      runs_.push_back({.first = rank, .count = 1});
  }
}

std::vector<int> Members::ranks() const {
  std::vector<int> all;
  all.reserve(static_cast<std::size_t>(size()));
  for (const Run& run : runs_)
    for (int i = 0; i < run.count; ++i) all.push_back(run.first + i * run.step);
  return all;
}

int Members::size() const {
  int count = 0;
  for (const Run& run : runs_) count += run.count;
  return count;
}

std::string Members::text() const {
  std::string text;
  for (const Run& run : runs_) text += fmt::format("{}{}+{}x{}", text.empty() ? "" : ",", run.first, run.step, run.count);
  return text;
}

std::optional<Members> Members::parse(std::string_view text) {
  constexpr std::int64_t kMost = 1 << 20;
  Members members;
  const char *at = text.data(), *end = text.data() + text.size();
  std::int64_t total = 0;
  const auto number = [&](int& value) {
    const auto [stop, error] = std::from_chars(at, end, value);
    at = stop;
    return error == std::errc();
  };
  const auto sign = [&](char wanted) { return at != end && *at++ == wanted; };
  while (at != end) {
    Run run;
    if (!members.runs_.empty() && !sign(',')) return std::nullopt;
    if (!number(run.first) || !sign('+') || !number(run.step) || !sign('x') || !number(run.count)) return std::nullopt;
    const std::int64_t last = run.first + static_cast<std::int64_t>(run.step) * (run.count - 1);
    if (run.count < 1 || (total += run.count) > kMost || last != static_cast<int>(last)) return std::nullopt;
    members.runs_.push_back(run);
  }
  return members;
}

}  // namespace bonfire
