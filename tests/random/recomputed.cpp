#include "tests/random/recomputed.h"

#include <algorithm>
#include <string>
#include <vector>

#include "bonfire/base/random.h"
#include "tests/random/parts.h"

namespace bonfire::cases {

RecomputedUnits recomputed_units(torch::nn::Module& module, int kind, std::uint64_t seed, bool leaves) {
  if (kind == 0) return {};
  std::vector<const torch::nn::Module*> units;
  RecomputedUnits(module, [&](const std::string&, torch::nn::Module& unit) {
    units.push_back(&unit);
    return false;
  });
  // A Unit at several places has the path of one of them: paths do not tell.
  const auto holds_another = [&](const torch::nn::Module& unit) {
    const auto below = unit.modules(/*include_self=*/false);
    return std::any_of(below.begin(), below.end(), [&](const auto& child) {
      return std::find(units.begin(), units.end(), child.get()) != units.end();
    });
  };
  return RecomputedUnits(module, [&](const std::string& path, torch::nn::Module& unit) {
    if (const auto* part = dynamic_cast<const PartImpl*>(&unit); part && part->writes_to_input()) return false;
    if (leaves && holds_another(unit)) return false;
    return kind == 1 || Random(seed).fork("recomputed").fork(path).below(static_cast<std::uint64_t>(kind), 2) == 0;
  });
}

}  // namespace bonfire::cases
