#pragma once

#include <cstdint>

#include "bonfire/base/api.h"

namespace bonfire {

enum class Decay { constant, linear, cosine };

// The learning rate of each step: from 0 up to `peak` over the warm-up, then down to `least` at the last step.
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
