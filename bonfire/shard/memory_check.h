#pragma once

#include "bonfire/shard/hooked_units.h"
#include "bonfire/shard/parameter_layout.h"

namespace bonfire {

// For finding mistakes: checks that no tensor that goes into a Unit or comes out of it lies in a parameter whose memory is
// freed.
class MemoryCheck final : public EngineHook {
 public:
  // Both outlive this.
  MemoryCheck(const ParameterLayout& layout, const HookedUnits& units) : layout_(layout), units_(units) {}

  void before_forward(UnitSeam& unit, std::vector<at::Tensor>& inputs) override { check(unit, inputs); }
  void after_forward(UnitSeam& unit, std::vector<at::Tensor>& outputs) override { check(unit, outputs); }

 private:
  void check(const UnitSeam& unit, const std::vector<at::Tensor>& tensors) const;

  const ParameterLayout& layout_;
  const HookedUnits& units_;
};

}  // namespace bonfire
