#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

#include "bonfire/pipeline/chain.h"

// A model that is none of ours, and cheap: several values cross every cut, one of them without a gradient, and the first and
// the last Unit share a weight under different names.
namespace bonfire::testing {

inline constexpr std::int64_t skip_width = 6;

// Numbers that differ, in fp64.
at::Tensor numbers(at::IntArrayRef shape, double shift);

Chain skip_chain(int units);
// Microbatches of two and of three samples in turn.
std::vector<Microbatch> skip_batch(int microbatches, int step);

}  // namespace bonfire::testing
