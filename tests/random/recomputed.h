#pragma once

#include <cstdint>

#include "bonfire/nn/recompute.h"

namespace bonfire::cases {

// The Units of a module that run again in backward. `kind`: 0: none; 1: all that can, which are those that do not write to
// their input; 2, 3: about half of them, by the seed. `leaves`: only such as hold no other Unit.
RecomputedUnits recomputed_units(torch::nn::Module& module, int kind, std::uint64_t seed, bool leaves);

}  // namespace bonfire::cases
