#include "bonfire/plan/cuts.h"

#include <algorithm>
#include <bit>
#include <map>
#include <numeric>

#include "bonfire/base/error.h"

namespace bonfire::plan {
namespace {

using UnitSet = std::vector<std::uint64_t>;

bool has_unit(const UnitSet& set, int unit) {
  return (set[static_cast<std::size_t>(unit) / 64] >> (static_cast<std::size_t>(unit) % 64) & 1U) != 0;
}
void add_unit(UnitSet& set, int unit) {
  set[static_cast<std::size_t>(unit) / 64] |= std::uint64_t{1} << (static_cast<std::size_t>(unit) % 64);
}
int units_in(const UnitSet& set) {
  return std::accumulate(set.begin(), set.end(), 0, [](int sum, std::uint64_t word) { return sum + std::popcount(word); });
}

struct UnitGraph {
  std::vector<std::vector<int>> next, before;
  std::vector<int> order;          // in which the Units can run
  std::vector<UnitSet> ancestors;  // of each Unit, and itself
};

UnitGraph unit_graph(const Profile& profile) {
  const auto units = profile.units.size();
  UnitGraph graph{std::vector<std::vector<int>>(units),
                  std::vector<std::vector<int>>(units),
                  {},
                  std::vector<UnitSet>(units, UnitSet((units + 63) / 64))};
  for (const auto& [from, to] : profile.edges) {
    graph.next[static_cast<std::size_t>(from)].push_back(to);
    graph.before[static_cast<std::size_t>(to)].push_back(from);
  }
  std::vector<std::size_t> waits(units);
  for (std::size_t unit = 0; unit < units; ++unit) {
    waits[unit] = graph.before[unit].size();
    if (waits[unit] == 0) graph.order.push_back(static_cast<int>(unit));
  }
  for (std::size_t at = 0; at < graph.order.size(); ++at) {
    const auto unit = static_cast<std::size_t>(graph.order[at]);
    add_unit(graph.ancestors[unit], static_cast<int>(unit));
    for (const int before : graph.before[unit])
      for (std::size_t word = 0; word < graph.ancestors[unit].size(); ++word)
        graph.ancestors[unit][word] |= graph.ancestors[static_cast<std::size_t>(before)][word];
    for (const int next : graph.next[unit])
      if (--waits[static_cast<std::size_t>(next)] == 0) graph.order.push_back(next);
  }
  if (graph.order.size() != units) fail_config("profile of {}: its graph goes round in a circle", profile.model);
  return graph;
}

std::vector<UnitSet> sets_of_units(const Profile& profile, const UnitGraph& graph) {
  const int source = graph.order.front();
  std::map<UnitSet, bool> known{{graph.ancestors[static_cast<std::size_t>(source)], true}};
  std::vector<UnitSet> found{known.begin()->first};
  for (std::size_t at = 0; at < found.size(); ++at) {
    for (std::size_t unit = 0; unit < profile.units.size(); ++unit) {
      if (!has_unit(found[at], static_cast<int>(unit))) continue;
      for (const int next : graph.next[unit]) {
        if (has_unit(found[at], next)) continue;
        UnitSet set = found[at];
        for (std::size_t word = 0; word < set.size(); ++word)
          set[word] |= graph.ancestors[static_cast<std::size_t>(next)][word];
        if (!known.emplace(set, true).second) continue;
        found.push_back(std::move(set));
        if (found.size() > most_cuts)
          fail_config("profile of {}: its graph can be cut in more than {} ways; join Units of parallel branches",
                      profile.model, most_cuts);
      }
    }
  }
  std::stable_sort(found.begin(), found.end(), [](const UnitSet& a, const UnitSet& b) { return units_in(a) < units_in(b); });
  if (units_in(found.back()) != static_cast<int>(profile.units.size()))
    fail_config("profile of {}: {} of {} Units do not lead to what '{}' leads to", profile.model,
                static_cast<int>(profile.units.size()) - units_in(found.back()), profile.units.size(),
                profile.units[static_cast<std::size_t>(source)].name);
  return found;
}

void count_unit(Cut& cut, const UnitProfile& unit) {
  cut.seconds += unit.forward + unit.backward;
  cut.parameter_bytes += unit.parameter_bytes;
  cut.state_bytes += unit.state_bytes;
  cut.saved_bytes += unit.saved_bytes;
}

}  // namespace

Cuts::Cuts(const Profile& profile) {
  require(!profile.units.empty(), "a profile without Units");
  if (profile.chain()) {
    Cut cut;
    for (const auto& unit : profile.units) {
      count_unit(cut, unit);
      cut.crossing_bytes = unit.output_bytes;
      order_.push_back(count());
      cuts_.push_back(cut);
    }
    if (count() > most_cuts) fail_config("profile of {}: {} Units; allowed: up to {}", profile.model, count(), most_cuts);
    return;
  }
  const UnitGraph graph = unit_graph(profile);
  order_ = graph.order;
  members_ = sets_of_units(profile, graph);
  for (const auto& set : members_) {
    Cut& cut = cuts_.emplace_back();
    for (const int unit : order_) {
      if (!has_unit(set, unit)) continue;
      count_unit(cut, profile.units[static_cast<std::size_t>(unit)]);
      const auto& next = graph.next[static_cast<std::size_t>(unit)];
      if (std::any_of(next.begin(), next.end(), [&](int reader) { return !has_unit(set, reader); }))
        cut.crossing_bytes += profile.units[static_cast<std::size_t>(unit)].output_bytes;
    }
  }
}

bool Cuts::precedes(int first, int then) const {
  if (members_.empty()) return first < then;
  const auto& a = members_[static_cast<std::size_t>(first)];
  const auto& b = members_[static_cast<std::size_t>(then)];
  for (std::size_t word = 0; word < a.size(); ++word)
    if ((a[word] & ~b[word]) != 0) return false;
  return true;
}

std::vector<int> Cuts::between(int first, int then) const {
  std::vector<int> units;
  for (std::size_t at = 0; at < order_.size(); ++at) {
    const int unit = order_[at];
    const auto before = [&](int cut) {
      if (cut < 0) return false;
      return members_.empty() ? static_cast<int>(at) <= cut : has_unit(members_[static_cast<std::size_t>(cut)], unit);
    };
    if (before(then) && !before(first)) units.push_back(unit);
  }
  return units;
}

}  // namespace bonfire::plan
