#pragma once

#include <map>
#include <optional>
#include <utility>

#include "bonfire/shard/hooked_units.h"

namespace bonfire {

// Casts what Units are given to the type that they compute in, and what the outermost one returns to that of the outputs.
// What a Unit with a type of its own returns comes back in the type of what it was given.
class Casting final : public EngineHook {
 public:
  struct Types {
    std::optional<at::ScalarType> inputs{}, outputs{};     // of floating-point tensors; empty: as they are
    std::map<const UnitSeam*, at::ScalarType> of_units{};  // of those whose inputs have a type of their own
  };
  explicit Casting(Types types) : types_(std::move(types)) {}

  void before_forward(UnitSeam& unit, std::vector<at::Tensor>& inputs) override;
  void after_forward(UnitSeam& unit, std::vector<at::Tensor>& outputs) override;
  void forward_failed(UnitSeam&) override { back_.pop_back(); }

 private:
  Types types_;
  // Of the Units that run, each inside of the one before it: what is cast back.
  std::vector<std::optional<at::ScalarType>> back_;
};

}  // namespace bonfire
