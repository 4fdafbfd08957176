#include "bonfire/optim/clip.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/zeros.h>

#include "bonfire/base/error.h"
#include "bonfire/kernels/sum_of_squares.h"
#include "bonfire/shard/engine.h"

namespace bonfire {
namespace {

// Limits beyond it cannot be written in the gradients' type.
double largest(at::ScalarType type) {
  switch (type) {
    case at::kHalf: return std::numeric_limits<at::Half>::max();
    case at::kBFloat16: return std::numeric_limits<at::BFloat16>::max();
    case at::kFloat: return std::numeric_limits<float>::max();
    default: return std::numeric_limits<double>::max();
  }
}

}  // namespace

at::Tensor local_squares(const Engine& engine, const std::function<bool(const FlatParameter&)>& counts) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> gradients;
  for (const auto& flat : engine.flats())
    for (const auto& share : flat->trained())
      if (!counts || counts(*flat)) gradients.push_back(share.gradient);
  if (!gradients.empty()) return sum_of_squares(gradients);
  if (engine.flats().empty()) return at::zeros({}, at::kDouble);
  return at::zeros({}, at::TensorOptions(at::kDouble).device(engine.flats().front()->parameters().front().device()));
}

void add_over_shares(const Engine& engine, at::Tensor& squares) {
  engine.mesh().group(Axis::shard).all_reduce(squares).wait();
}

double norm_over_shares(const Engine& engine, at::Tensor squares) {
  add_over_shares(engine, squares);
  return std::sqrt(squares.item<double>());
}

double gradient_norm(const Engine& engine) { return norm_over_shares(engine, local_squares(engine)); }

namespace {
constexpr double never_zero = 1e-6;  // torch's: it keeps a norm of exactly zero from dividing
}  // namespace

double clip_factor(double norm, double limit) { return limit > 0 && norm > limit ? limit / (norm + never_zero) : 1; }

at::Tensor clip_factor(const at::Tensor& norm, double limit) {
  if (limit <= 0) return at::full_like(norm, 1);
  return at::full_like(norm, limit).div_(norm.add(never_zero)).masked_fill_(norm.gt(limit).logical_not_(), 1);
}

void clip_values(Engine& engine, double limit) {
  require(limit > 0, "gradients cannot be limited to {}, must be more than 0", limit);
  const at::NoGradGuard no_grad;
  for (const auto& flat : engine.flats())
    for (auto& share : flat->trained()) {
      const double bound = std::min(limit, largest(share.gradient.scalar_type()));
      share.gradient.clamp_(-bound, bound);
    }
}

}  // namespace bonfire
