#include "bonfire/optim/clip.h"

#include <cmath>

#include "bonfire/kernels/optimizer.h"
#include "bonfire/shard/engine.h"

namespace bonfire {

double gradient_norm(const Engine& engine) {
  at::Tensor sum;
  for (const auto& flat : engine.flats()) {
    if (flat->layout().trained == 0) continue;
    auto squares = sum_of_squares(flat->gradient());
    sum = sum.defined() ? sum.add_(squares) : squares;
  }
  return sum.defined() ? std::sqrt(sum.item<double>()) : 0;
}

double clip_factor(double norm, double limit) {
  // The small number is torch's: it keeps a norm of exactly zero from dividing.
  return limit > 0 && norm > limit ? limit / (norm + 1e-6) : 1;
}

}  // namespace bonfire
