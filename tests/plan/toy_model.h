#pragma once

#include <string>
#include <vector>

#include "bonfire/plan/model.h"

namespace bonfire::plan::testing {

// Units "a", "b", ... in forward order, each with one trained parameter of so many elements. Multiples of 256 need no
// padding on up to four ranks.
inline ModelDescription toy_model(const std::vector<std::int64_t>& elements) {
  ModelDescription model;
  for (std::size_t at = 0; at < elements.size(); ++at) {
    UnitDescription unit{.name = std::string(1, static_cast<char>('a' + at))};
    unit.parameters.push_back({.name = "weight", .shape = {elements[at]}});
    model.units.push_back(std::move(unit));
  }
  return model;
}

// The same behind a root that holds a weight which the first and the last Unit read too.
inline ModelDescription tied_toy_model(std::int64_t root, const std::vector<std::int64_t>& elements) {
  auto model = toy_model(elements);
  model.units.front().shared = model.units.back().shared = {"tied"};
  UnitDescription unit{.name = "", .kind = UnitKind::root};
  unit.parameters.push_back({.name = "tied", .shape = {root}});
  model.units.insert(model.units.begin(), std::move(unit));
  return model;
}

}  // namespace bonfire::plan::testing
