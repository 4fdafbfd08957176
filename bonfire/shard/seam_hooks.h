#pragma once

#include <functional>
#include <memory>
#include <optional>

#include "bonfire/shard/casting.h"
#include "bonfire/shard/flat_group.h"
#include "bonfire/shard/hooked_units.h"
#include "bonfire/shard/memory_check.h"
#include "bonfire/shard/residency.h"

namespace bonfire {

// What an engine has on the seams of its module's Units, whoever drives it: each hook only where there is something to do.
class SeamHooks {
 public:
  struct Options {
    bool casts = false;  // what goes into Units, and what comes out of the outermost one
    // Before the first Unit of a pass that gathers is entered.
    std::function<void(bool differentiates)> before_pass{};
    bool ends_evaluations = true;  // see ResidencyOptions
  };
  // `flats` outlives this. Throws where a Unit is part of another engine.
  SeamHooks(FlatGroup& flats, torch::nn::Module& module, Options options);

  // Parameters lie elsewhere from now on.
  void laid_out();
  Residency* residency() const { return residency_.get(); }  // null: Units do not gather

 private:
  void put_residency(Options options);

  FlatGroup& flats_;
  // The hooks, the outermost first, and then the Units that they are on, which take them off.
  std::optional<MemoryCheck> check_;
  std::optional<Casting> casting_;
  std::shared_ptr<Residency> residency_;
  HookedUnits units_;
};

}  // namespace bonfire
