#include "bonfire/pipeline/split.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include <fmt/ranges.h>

#include "bonfire/base/error.h"

namespace bonfire {
namespace {

void require_units(int units, int stages) {
  if (stages < 1) fail_config("a pipeline of {} stages; allowed: 1 or more", stages);
  if (stages > units)
    fail_config("{} stages for a model of {} Units: a stage has at least one; allowed: up to {} stages (pipeline x chunks)",
                stages, units, units);
}

}  // namespace

std::vector<UnitRange> split_evenly(int units, int stages) {
  require_units(units, stages);
  std::vector<UnitRange> ranges;
  for (int stage = 0, begin = 0; stage < stages; ++stage) {
    const int count = units / stages + (stage < units % stages ? 1 : 0);
    ranges.push_back({begin, begin + count});
    begin += count;
  }
  return ranges;
}

std::vector<UnitRange> split_by_cost(const std::vector<double>& costs, int stages) {
  const int units = static_cast<int>(costs.size());
  require_units(units, stages);
  for (int unit = 0; unit < units; ++unit)
    require(costs[static_cast<std::size_t>(unit)] >= 0, "Unit {} costs {}; allowed: 0 or more", unit,
            costs[static_cast<std::size_t>(unit)]);
  std::vector<double> until(costs.size() + 1, 0);
  std::partial_sum(costs.begin(), costs.end(), until.begin() + 1);
  // best[s][n]: the longest of s stages that hold the first n Units; cut[s][n]: where the last of them begins.
  const auto count = costs.size() + 1;
  std::vector best(static_cast<std::size_t>(stages) + 1,
                   std::vector<double>(count, std::numeric_limits<double>::infinity()));
  std::vector cut(best.size(), std::vector<std::size_t>(count, 0));
  best[0][0] = 0;
  for (std::size_t stage = 1; stage < best.size(); ++stage)
    for (std::size_t end = stage; end < count; ++end)
      for (std::size_t begin = stage - 1; begin < end; ++begin) {
        const double longest = std::max(best[stage - 1][begin], until[end] - until[begin]);
        if (longest <= best[stage][end]) best[stage][end] = longest, cut[stage][end] = begin;
      }
  std::vector<UnitRange> ranges(static_cast<std::size_t>(stages));
  std::size_t end = costs.size();
  for (std::size_t stage = ranges.size(); stage-- > 0;) {
    const std::size_t begin = cut[stage + 1][end];
    ranges[stage] = {static_cast<int>(begin), static_cast<int>(end)};
    end = begin;
  }
  return ranges;
}

std::vector<UnitRange> split_as_told(int units, const std::vector<int>& units_of_stage) {
  require_units(units, static_cast<int>(units_of_stage.size()));
  std::vector<UnitRange> ranges;
  int begin = 0;
  for (const int count : units_of_stage) {
    if (count < 1) fail_config("a stage of {} Units; allowed: 1 or more", count);
    ranges.push_back({begin, begin + count});
    begin += count;
  }
  if (begin != units)
    fail_config("stages of {} Units are {} together; the model has {}", fmt::join(units_of_stage, ", "), begin, units);
  return ranges;
}

}  // namespace bonfire
