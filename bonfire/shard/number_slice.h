#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "bonfire/plan/placement.h"
#include "bonfire/shard/shares.h"
#include "bonfire/shard/slices.h"

namespace bonfire {

// One number, which all ranks have.
struct NumberSlice {
  std::string name{};  // of the parameter that it belongs to; empty: the whole model
  std::string kind;
  std::function<std::int64_t()> get;
  std::function<void(std::int64_t)> set;
};

// Of the whole model.
Slice slice_of(NumberSlice number, const Shares::Division& division);
// Of a parameter, whose name it takes. All parts of a split one have the number; that of its beginning counts.
Slice slice_of(NumberSlice number, const Shares::Division& division, const plan::Placement& of);

}  // namespace bonfire
