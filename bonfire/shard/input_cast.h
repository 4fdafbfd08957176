#pragma once

#include <vector>

#include "bonfire/nn/unit.h"

namespace bonfire {

// Floating-point tensors become those of `type`.
void cast_to(at::ScalarType type, std::vector<at::Tensor>& tensors);

// Casts what Units are given to the type of their parameters, where nothing else is to be done at their forward.
class InputCast final : public UnitHooks {
 public:
  explicit InputCast(at::ScalarType type) : type_(type) {}
  void before_forward(UnitSeam& unit, std::vector<at::Tensor>& inputs) override;
  void after_forward(UnitSeam&, std::vector<at::Tensor>&) override {}

 private:
  at::ScalarType type_;
};

}  // namespace bonfire
