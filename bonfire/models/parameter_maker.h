#pragma once

#include <string_view>

#include "bonfire/models/model.h"

namespace bonfire {

// Makes the parameters that a Unit's description lists, with their first values. Each is taken exactly once, in the order
// of the list, so a Unit cannot be built otherwise than it is described.
class ParameterMaker {
 public:
  ParameterMaker(const plan::UnitDescription& unit, const BuildOptions& options) : unit_(unit), options_(options) {}

  at::Tensor take(std::string_view name);
  // Undefined where the Unit has no such parameter.
  at::Tensor take_if_any(std::string_view name);
  // Throws where something was not taken.
  void finish() const;

 private:
  const plan::UnitDescription& unit_;
  const BuildOptions& options_;
  std::size_t next_ = 0;
};

}  // namespace bonfire
