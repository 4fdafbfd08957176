#include "bonfire/optim/learning_rate.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace bonfire {

double LearningRate::at(std::int64_t step) const {
  const std::int64_t top = std::max<std::int64_t>(warmup - 1, 0), last = steps - 1;  // the steps of peak and least
  if (step < top) return peak * static_cast<double>(step + 1) / static_cast<double>(warmup);
  if (decay == Decay::constant) return peak;
  const auto length = static_cast<double>(std::max<std::int64_t>(last - top, 1));
  const double done = std::clamp(static_cast<double>(step - top) / length, 0.0, 1.0);
  const double left = decay == Decay::linear ? 1 - done : 0.5 * (1 + std::cos(std::numbers::pi * done));
  return least + (peak - least) * left;
}

}  // namespace bonfire
