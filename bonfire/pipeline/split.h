#pragma once

#include <string>
#include <vector>

#include "bonfire/base/api.h"

namespace bonfire {

// Units [begin, end) of a model.
struct UnitRange {
  int begin = 0;
  int end = 0;

  int count() const { return end - begin; }
  bool contains(int unit) const { return unit >= begin && unit < end; }
  bool operator==(const UnitRange&) const = default;
};

// Ways to cut `units` consecutive Units into stages. Every Unit is in exactly one of them and no stage is empty; throws
// ConfigError where there are more stages than Units.
//
// Counts differ by one at most; the longer stages come first, away from the loss.
BONFIRE_API std::vector<UnitRange> split_evenly(int units, int stages);
// The longest stage is as short as it can be; of such cuts, the one whose stages are filled from the front.
BONFIRE_API std::vector<UnitRange> split_by_cost(const std::vector<double>& cost_of_unit, int stages);
// As told: how many Units each stage has. Throws ConfigError unless they are all of them.
BONFIRE_API std::vector<UnitRange> split_as_told(int units, const std::vector<int>& units_of_stage);

}  // namespace bonfire
