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

// A verdict is read by every rank: it names no more than so many of them.
constexpr std::size_t kMostNamed = 16;

// "rank 1", "ranks 0, 1 and 3", "ranks 0, 1, 2, ... and 1000 others".
std::string list(const std::vector<int>& ranks) {
  if (ranks.size() == 1) return fmt::format("rank {}", ranks.front());
  const bool many = ranks.size() > kMostNamed;
  const std::vector<int> head(ranks.begin(), many ? ranks.begin() + kMostNamed : ranks.end() - 1);
  if (many) return fmt::format("ranks {} and {} others", fmt::join(head, ", "), ranks.size() - kMostNamed);
  return fmt::format("ranks {} and {}", fmt::join(head, ", "), ranks.back());
}

// What `say` tells of each, up to so many of them.
template <class Say>
std::string of_each(const std::vector<int>& ranks, const Say& say) {
  std::string text;
  for (std::size_t i = 0; i < ranks.size() && i < kMostNamed; ++i) text += (i == 0 ? "" : "; ") + say(ranks[i]);
  if (ranks.size() > kMostNamed) text += fmt::format("; and {} others", ranks.size() - kMostNamed);
  return text;
}

// What the others wait in, those in the same place together. REQUIRES: `named` is in order.
std::string the_others(const std::vector<Observed>& ranks, const std::vector<int>& named) {
  std::map<std::string, std::vector<int>> places;
  for (int rank = 0; rank < static_cast<int>(ranks.size()); ++rank) {
    if (std::binary_search(named.begin(), named.end(), rank)) continue;
    const Where where = longest_wait(ranks[static_cast<std::size_t>(rank)].progress);
    if (where.place != nullptr) places[name_of_place(*where.lane, *where.place)].push_back(rank);
  }
  std::string text;
  std::size_t told = 0;
  for (const auto& [place, members] : places) {
    if (told++ == kMostNamed) {
      text += fmt::format("; others wait in {} other places", places.size() - kMostNamed);
      break;
    }
    text += fmt::format("; {} {} in {}", list(members), members.size() == 1 ? "waits" : "wait", place);
  }
  return text;
}

struct Waits {
  std::set<int> waiting;  // for longer than the limit, for somebody who has not come as far
  std::set<int> awaited;  // by one of those
};

// The same group, as its members see it.
using Held = std::map<int, const Lane*>;

using Kinds = std::map<std::int64_t, std::set<CollectiveKind>>;  // by the number of the collective

void add_collective_waits(const Held& held, const std::vector<int>& members, const std::set<int>& late, Waits& waits) {
  Kinds kinds, late_kinds;
  std::int64_t lowest = held.size() < members.size() ? -1 : held.begin()->second->collective.begun, highest = -1;
  for (const auto& [rank, lane] : held) {
    const Place& place = lane->collective;
    lowest = std::min(lowest, place.begun);
    kinds[place.begun].insert(place.kind);
    if (!late.contains(rank)) continue;
    highest = std::max(highest, place.begun);
    late_kinds[place.begun].insert(place.kind);
  }
  for (const int rank : late) {
    const std::int64_t begun = held.at(rank)->collective.begun;
    if (lowest < begun || kinds.at(begun).size() > 1) waits.waiting.insert(rank);
  }
  for (const int member : members) {
    const auto there = held.find(member);
    if (there == held.end()) {
      waits.awaited.insert(member);
      continue;
    }
    const Place& place = there->second->collective;
    const auto same = late_kinds.find(place.begun);
    const bool another_kind = same != late_kinds.end() && (same->second.size() > 1 || !same->second.contains(place.kind));
    if (place.begun < highest || another_kind) waits.awaited.insert(member);
  }
}

// Whose message it is cannot be told; it is not one who is in the exchange, too.
void add_message_waits(const Held& held, const std::vector<int>& members, const std::set<int>& late, Waits& waits) {
  std::set<int> absent;
  for (const int member : members) {
    const auto there = held.find(member);
    if (there == held.end() || !pending(there->second->message)) absent.insert(member);
  }
  if (absent.empty()) return;
  waits.waiting.insert(late.begin(), late.end());
  waits.awaited.merge(absent);
}

// Each group is looked at once, so that this takes no longer than reading what the ranks have said.
Waits long_waits(const std::vector<Observed>& ranks, double limit) {
  std::map<std::pair<std::string, Members>, Held> groups;
  for (int rank = 0; rank < static_cast<int>(ranks.size()); ++rank)
    for (const Lane& lane : ranks[static_cast<std::size_t>(rank)].progress.lanes)
      groups[{lane.group, lane.ranks}][rank] = &lane;
  Waits waits;
  for (const auto& [group, held] : groups) {
    std::set<int> in_collective, in_message;
    for (const auto& [rank, lane] : held) {
      const double silent = ranks[static_cast<std::size_t>(rank)].silent;
      if (pending(lane->collective) && lane->collective.age + silent > limit) in_collective.insert(rank);
      if (pending(lane->message) && lane->message.age + silent > limit) in_message.insert(rank);
    }
    if (in_collective.empty() && in_message.empty()) continue;
    std::vector<int> members = group.second.ranks();
    std::erase_if(members, [&](int rank) { return rank < 0 || rank >= static_cast<int>(ranks.size()); });
    if (!in_collective.empty()) add_collective_waits(held, members, in_collective, waits);
    if (!in_message.empty()) add_message_waits(held, members, in_message, waits);
  }
  return waits;
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
std::string hold_text(int number, const std::string& holder) { return fmt::format("{} {}", number, holder); }
bool says_held(const std::string& text) { return !text.ends_with(' '); }

std::string lost_key(int rank) { return fmt::format("lost/{}", rank); }
std::string returned_key(int rank) { return fmt::format("returned/{}", rank); }
std::string lost_text(int times, bool for_good) { return fmt::format("{}{}", times, for_good ? " for good" : ""); }
bool lost_for_good(const std::string& text) { return text.ends_with(" for good"); }

std::optional<std::string> find_stall(const std::vector<Observed>& ranks, const StallLimits& limits) {
  const int size = static_cast<int>(ranks.size());
  std::vector<int> lost;
  for (int rank = 0; rank < size; ++rank) {
    const Observed& seen = ranks[static_cast<std::size_t>(rank)];
    if (limits.silent > 0 && !seen.progress.finished && !seen.gone && std::min(seen.silent, seen.free) > limits.silent)
      lost.push_back(rank);
  }
  const auto seen = [&](int rank) -> const Observed& { return ranks[static_cast<std::size_t>(rank)]; };
  if (!lost.empty())
    return of_each(lost,
                   [&](int rank) {
                     return fmt::format("rank {} has not been heard of for {:.1f} s: it was {}", rank, seen(rank).silent,
                                        whereabouts(seen(rank)));
                   }) +
           the_others(ranks, lost);

  if (limits.behind <= 0) return std::nullopt;
  // Whoever was held, others may have waited for it, and others for them: their time begins when it was let go.
  if (std::any_of(ranks.begin(), ranks.end(), [&](const Observed& rank) { return rank.free <= limits.behind; }))
    return std::nullopt;
  Waits waits = long_waits(ranks, limits.behind);
  std::erase_if(waits.awaited, [&](int rank) { return seen(rank).gone; });
  if (waits.awaited.empty()) return std::nullopt;
  std::vector<int> roots;  // awaited, and waiting for nobody
  std::set_difference(waits.awaited.begin(), waits.awaited.end(), waits.waiting.begin(), waits.waiting.end(),
                      std::back_inserter(roots));
  // Those who wait, wait for somebody who has said that it takes long.
  if (std::any_of(roots.begin(), roots.end(), [&](int rank) { return !seen(rank).progress.busy.empty(); }))
    return std::nullopt;
  if (roots.empty())
    return "ranks wait for each other: " + of_each({waits.awaited.begin(), waits.awaited.end()}, [&](int rank) {
             return fmt::format("rank {} is {}", rank, whereabouts(seen(rank)));
           });
  return of_each(roots,
                 [&](int rank) {
                   return fmt::format("rank {} {}: {}", rank, seen(rank).progress.finished ? "has left" : "is behind",
                                      whereabouts(seen(rank)));
                 }) +
         the_others(ranks, roots);
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

std::optional<Straggler> StragglerWatch::look(const std::vector<Progress>& ranks) {
  if (factor_ <= 0) return std::nullopt;
  const auto slowest = find_straggler(ranks, factor_);
  if (!slowest) {
    steps_ = 0;
    return std::nullopt;
  }
  const std::int64_t step = ranks[static_cast<std::size_t>(slowest->rank)].step;
  if (slowest->rank != rank_) steps_ = 0;
  if (steps_ > 0 && step == step_) return std::nullopt;  // seen already
  rank_ = slowest->rank;
  step_ = step;
  return ++steps_ == kStragglerSteps ? slowest : std::nullopt;
}

}  // namespace bonfire
