#include "bonfire/comm/stall.h"

#include <algorithm>
#include <charconv>
#include <map>
#include <set>

#include <fmt/ranges.h>

#include "bonfire/base/error.h"

namespace bonfire {
namespace {

using Lane = Progress::Lane;
using Place = Progress::Lane::Place;

bool pending(const Place& place) { return place.begun > place.ended; }

// What a rank is in, for people: "all_reduce #17 of 'replicate'".
std::string name_of_place(const Lane& lane, const Place& place) {
  return fmt::format("{} #{} of '{}'", name_of(place.kind), place.begun, lane.group);
}

// The pending operation that a rank has been in longest.
struct Where {
  const Lane* lane = nullptr;
  const Place* place = nullptr;
};

Where longest_wait(const Progress& progress) {
  Where longest;
  for (const Lane& lane : progress.lanes)
    for (const Place* place : {&lane.collective, &lane.message})
      if (pending(*place) && (longest.place == nullptr || place->age > longest.place->age)) longest = {&lane, place};
  return longest;
}

// Where a rank is, or was last, and since when.
std::string whereabouts(const Observed& rank) {
  const Progress& progress = rank.progress;
  const Where now = longest_wait(progress);
  std::string text;
  if (now.place != nullptr) {
    text = fmt::format("in {} since {:.1f} s ago", name_of_place(*now.lane, *now.place), now.place->age + rank.silent);
  } else {
    Where last;
    for (const Lane& lane : progress.lanes)
      for (const Place* place : {&lane.collective, &lane.message})
        if (place->begun > 0 && (last.place == nullptr || place->age < last.place->age)) last = {&lane, place};
    text = last.place == nullptr ? "in no collective yet"
                                 : fmt::format("in no collective; its last was {}, {:.1f} s ago",
                                               name_of_place(*last.lane, *last.place), last.place->age + rank.silent);
  }
  if (progress.step >= 0) text += fmt::format(", after step {}", progress.step);
  return text;
}

// "rank 1", "ranks 0, 1 and 3".
std::string list(const std::vector<int>& ranks) {
  if (ranks.size() == 1) return fmt::format("rank {}", ranks.front());
  const std::vector<int> head(ranks.begin(), ranks.end() - 1);
  return fmt::format("ranks {} and {}", fmt::join(head, ", "), ranks.back());
}

// What the others wait in, those in the same place together.
std::string the_others(const std::vector<Observed>& ranks, const std::vector<int>& named) {
  std::map<std::string, std::vector<int>> places;
  for (int rank = 0; rank < static_cast<int>(ranks.size()); ++rank) {
    if (std::find(named.begin(), named.end(), rank) != named.end()) continue;
    const Where where = longest_wait(ranks[static_cast<std::size_t>(rank)].progress);
    if (where.place != nullptr) places[name_of_place(*where.lane, *where.place)].push_back(rank);
  }
  std::string text;
  for (const auto& [place, members] : places)
    text += fmt::format("; {} {} in {}", list(members), members.size() == 1 ? "waits" : "wait", place);
  return text;
}

// The ranks that `rank` has waited for longer than the limit: members of its group that have not come as far.
std::set<int> awaited_by(const std::vector<Observed>& ranks, int rank, double limit) {
  std::set<int> awaited;
  const Observed& self = ranks[static_cast<std::size_t>(rank)];
  for (const Lane& lane : self.progress.lanes) {
    const bool in_collective = pending(lane.collective) && lane.collective.age + self.silent > limit;
    const bool in_message = pending(lane.message) && lane.message.age + self.silent > limit;
    if (!in_collective && !in_message) continue;
    for (const int member : lane.ranks) {
      if (member == rank || member < 0 || member >= static_cast<int>(ranks.size())) continue;
      const Progress& other = ranks[static_cast<std::size_t>(member)].progress;
      const auto same = std::find_if(other.lanes.begin(), other.lanes.end(),
                                     [&](const Lane& l) { return l.group == lane.group && l.ranks == lane.ranks; });
      const bool there = same != other.lanes.end();
      if (in_collective &&
          (!there || same->collective.begun < lane.collective.begun ||
           (same->collective.begun == lane.collective.begun && same->collective.kind != lane.collective.kind)))
        awaited.insert(member);
      // Whose message it is cannot be told; it is not one who is in the exchange, too.
      if (in_message && (!there || !pending(same->message))) awaited.insert(member);
    }
  }
  return awaited;
}

double seconds_of(const Variables& variables, const std::string& name, double otherwise) {
  const auto found = variables.find(name);
  if (found == variables.end() || found->second.empty()) return otherwise;
  double value = 0;
  const std::string& text = found->second;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || !(value >= 0))
    fail_config("{} is '{}': a number of seconds is needed, or 0 for never", name, text);
  return value;
}

}  // namespace

StallLimits StallLimits::from(const Variables& variables) {
  const StallLimits usual;
  return {seconds_of(variables, "BONFIRE_HEARTBEAT_TIMEOUT", usual.silent),
          seconds_of(variables, "BONFIRE_STALL_TIMEOUT", usual.behind)};
}

std::string held_key(int rank) { return fmt::format("watchdog/held/{}", rank); }

std::optional<std::string> find_stall(const std::vector<Observed>& ranks, const StallLimits& limits) {
  const int size = static_cast<int>(ranks.size());
  std::vector<int> lost;
  for (int rank = 0; rank < size; ++rank) {
    const Observed& seen = ranks[static_cast<std::size_t>(rank)];
    if (limits.silent > 0 && !seen.progress.finished && !seen.held && seen.silent > limits.silent) lost.push_back(rank);
  }
  if (!lost.empty()) {
    std::string text;
    for (const int rank : lost)
      text += fmt::format("{}rank {} has not been heard of for {:.1f} s: it was {}", text.empty() ? "" : "; ", rank,
                          ranks[static_cast<std::size_t>(rank)].silent, whereabouts(ranks[static_cast<std::size_t>(rank)]));
    return text + the_others(ranks, lost);
  }

  if (limits.behind <= 0) return std::nullopt;
  std::set<int> awaited, waiting;
  for (int rank = 0; rank < size; ++rank) {
    const std::set<int> for_whom = awaited_by(ranks, rank, limits.behind);
    if (!for_whom.empty()) waiting.insert(rank);
    awaited.insert(for_whom.begin(), for_whom.end());
  }
  if (awaited.empty()) return std::nullopt;
  std::vector<int> roots;  // awaited, and waiting for nobody
  std::set_difference(awaited.begin(), awaited.end(), waiting.begin(), waiting.end(), std::back_inserter(roots));
  const auto progress_of = [&](int rank) -> const Progress& { return ranks[static_cast<std::size_t>(rank)].progress; };
  // Those who wait, wait for somebody who has said that it takes long.
  const auto takes_long = [&](int rank) {
    return !progress_of(rank).busy.empty() || ranks[static_cast<std::size_t>(rank)].held;
  };
  if (std::any_of(roots.begin(), roots.end(), takes_long)) return std::nullopt;
  if (roots.empty()) {
    std::string text = "ranks wait for each other";
    for (const int rank : awaited)
      text += fmt::format("{} rank {} is {}", text.back() == 'r' ? ":" : ";", rank,
                          whereabouts(ranks[static_cast<std::size_t>(rank)]));
    return text;
  }
  std::string text;
  for (const int rank : roots)
    text += fmt::format("{}rank {} {}: {}", text.empty() ? "" : "; ", rank,
                        progress_of(rank).finished ? "has left" : "is behind",
                        whereabouts(ranks[static_cast<std::size_t>(rank)]));
  return text + the_others(ranks, roots);
}

std::optional<Straggler> find_straggler(const std::vector<Progress>& ranks, double factor) {
  std::vector<double> times;
  Straggler slowest;
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    if (ranks[rank].step < 0 || ranks[rank].finished) return std::nullopt;
    times.push_back(ranks[rank].own_seconds);
    if (times.back() > slowest.own_seconds) slowest = {static_cast<int>(rank), times.back(), 0};
  }
  if (times.size() < 2) return std::nullopt;
  // Of two, the median is the faster one: else neither could ever stand out.
  const auto middle = times.begin() + static_cast<std::ptrdiff_t>((times.size() - 1) / 2);
  std::nth_element(times.begin(), middle, times.end());
  slowest.median_seconds = *middle;
  constexpr double kWorthAWord = 0.05;
  if (slowest.own_seconds <= factor * slowest.median_seconds) return std::nullopt;
  if (slowest.own_seconds <= slowest.median_seconds + kWorthAWord) return std::nullopt;
  return slowest;
}

}  // namespace bonfire
