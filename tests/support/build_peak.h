#pragma once

#include <algorithm>
#include <cstdint>

#include "bonfire/plan/memory.h"

namespace bonfire::testing {

// What a rank holds at most while a model is built Unit by Unit: the shares of those that are done and of the one at hand,
// which is still whole and has no gradients yet; and the model's tables. The root's own parameters are there from the
// beginning.
inline std::int64_t peak_of_build(const plan::ModelDescription& model, const plan::DataParallel& layout) {
  auto flats = plan::flats_of(model, layout);
  std::reverse(flats.begin(), flats.end());  // forward order, in which Units are built
  std::int64_t shares = 0, peak = 0, root = 0;
  std::size_t flat = 0;
  const std::int64_t element = plan::bytes_of(layout.master);
  for (const auto& unit : model.units) {
    if (unit.parameters.empty()) continue;
    const auto state = plan::model_state({flats[flat++]}, layout, /*optimizer_states=*/0);
    if (unit.kind == plan::UnitKind::root) {
      root = unit.parameter_elements() * element;
      continue;  // the root is sharded when everything in it is
    }
    peak = std::max(peak, shares + state.total() - state.gradients + root + unit.parameter_elements() * element);
    shares += state.total();
    peak = std::max(peak, shares + root);
  }
  return peak + model.constant_bytes;
}

// Equal values are shown by a number for each parameter, which each rank sends to every other.
inline std::int64_t fingerprints(const plan::ModelDescription& model, int ranks) {
  std::int64_t parameters = 0;
  for (const auto& unit : model.units) parameters += static_cast<std::int64_t>(unit.parameters.size());
  return parameters * (1 + ranks) * static_cast<std::int64_t>(sizeof(std::int64_t));
}

}  // namespace bonfire::testing
