#include "tests/random/recomputed.h"

#include <algorithm>
#include <string>
#include <vector>

#include "bonfire/base/random.h"
#include "tests/random/parts.h"

namespace bonfire::cases {

RecomputedUnits recomputed_units(torch::nn::Module& module, int kind, std::uint64_t seed, bool leaves) {
  if (kind == 0) return {};
  std::vector<std::string> paths;
  RecomputedUnits(module, [&](const std::string& path, torch::nn::Module&) {
    paths.push_back(path);
    return false;
  });
  const auto holds_another = [&](const std::string& path) {
    return std::any_of(paths.begin(), paths.end(),
                       [&](const auto& other) { return other != path && (path.empty() || other.starts_with(path + ".")); });
  };
  return RecomputedUnits(module, [&](const std::string& path, torch::nn::Module& unit) {
    if (const auto* part = dynamic_cast<const PartImpl*>(&unit); part && part->writes_to_input()) return false;
    if (leaves && holds_another(path)) return false;
    return kind == 1 || Random(seed).fork("recomputed").fork(path).below(static_cast<std::uint64_t>(kind), 2) == 0;
  });
}

}  // namespace bonfire::cases
