#pragma once

#include <memory>
#include <string>
#include <vector>

#include "bonfire/nn/unit.h"
#include "bonfire/shard/wrap.h"

namespace bonfire {

// A hook of an engine's: a Unit has those of one engine only.
class EngineHook : public UnitHook {};

// The Units of a module that have an engine's hooks: those that parameters belong to, and the root. They are taken off at
// the end, also where the module went before.
class HookedUnits {
 public:
  struct One {
    UnitSeam* unit;
    std::string name;                  // for messages: the path of the Unit, or "root"
    std::shared_ptr<UnitHooks> hooks;  // all that is left of it when the module is gone
    std::ptrdiff_t group = -1;         // of the module's parameters; -1: it has none of its own
  };

  // Throws where a Unit is part of another engine.
  HookedUnits(torch::nn::Module& root, const std::vector<ModuleGroup>& groups);
  ~HookedUnits();
  HookedUnits(const HookedUnits&) = delete;
  HookedUnits& operator=(const HookedUnits&) = delete;

  // On every Unit, inside of those that are there. Outlives this.
  void add(EngineHook& hook);
  const std::vector<One>& units() const { return units_; }
  const std::string& name_of(const UnitSeam& unit) const;

 private:
  std::vector<One> units_;
  std::vector<EngineHook*> added_;
};

}  // namespace bonfire
