#pragma once

#include <cstdint>

#include "bonfire/base/api.h"

namespace bonfire {

enum class Decay { constant, linear, cosine };

// The learning rate of each step: it grows from 0 and is `peak` at the last step of the warm-up (without one, at the first
// step), then falls to `least`, which it is at the last step. A run of one step takes it at the peak.
struct BONFIRE_API LearningRate {
  double peak = 1e-3;
  double least = 0;
  std::int64_t warmup = 0;
  std::int64_t steps = 1;  // in all
  Decay decay = Decay::constant;

  // Of step 0, 1, ...
  double at(std::int64_t step) const;
};

}  // namespace bonfire
