#include "bonfire/shard/hooked_units.h"

#include <algorithm>

#include <torch/nn/module.h>

#include "bonfire/base/error.h"

namespace bonfire {

HookedUnits::HookedUnits(torch::nn::Module& root, const std::vector<ModuleGroup>& groups) {
  const auto find = [this](const UnitSeam* unit) {
    return std::find_if(units_.begin(), units_.end(), [&](const One& known) { return known.unit == unit; });
  };
  const auto put = [&](UnitSeam* unit, std::string name, std::ptrdiff_t group) {
    if (!unit || find(unit) != units_.end()) return;
    if (const auto& hooks = unit->hooks().list())
      for (auto* hook : *hooks)
        require(!dynamic_cast<const EngineHook*>(hook), "Unit '{}' is part of another Engine already",
                unit->module().name());
    units_.push_back({.unit = unit, .name = std::move(name), .hooks = unit->shared_hooks(), .group = group});
  };
  for (std::size_t group = 0; group < groups.size(); ++group)
    put(groups[group].unit, groups[group].name.empty() ? "root" : groups[group].name, static_cast<std::ptrdiff_t>(group));
  put(unit_of(root), root.name(), -1);
}

HookedUnits::~HookedUnits() {
  for (const auto& one : units_)
    for (const auto* hook : added_) one.hooks->remove(*hook);
}

void HookedUnits::add(EngineHook& hook) {
  added_.push_back(&hook);
  for (const auto& one : units_) one.hooks->add(hook);
}

const std::string& HookedUnits::name_of(const UnitSeam& unit) const {
  return std::find_if(units_.begin(), units_.end(), [&](const One& one) { return one.unit == &unit; })->name;
}

}  // namespace bonfire
