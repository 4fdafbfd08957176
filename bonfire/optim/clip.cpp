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
#include "bonfire/shard/flat_parameter.h"
#include "bonfire/shard/shares.h"

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

at::Tensor local_squares(const Shares& shares) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> gradients;
  for (const auto& part : shares.parts())
    for (const auto& share : part.flat->trained())
      if (part.flat->layout().regions[share.region].copy == 0) gradients.push_back(share.gradient);
  if (!gradients.empty()) return sum_of_squares(gradients);
  return at::zeros({}, at::TensorOptions(at::kDouble).device(shares.device()));
}

double gradient_norm(const Shares& shares) {
  shares.require_gradients();
  auto squares = local_squares(shares);
  shares.sum(squares);
  return std::sqrt(squares.item<double>());
}

namespace {
constexpr double never_zero = 1e-6;  // torch's: it keeps a norm of exactly zero from dividing
}  // namespace

double clip_factor(double norm, double limit) { return limit > 0 && norm > limit ? limit / (norm + never_zero) : 1; }

at::Tensor clip_factor(const at::Tensor& norm, double limit) {
  if (limit <= 0) return at::full_like(norm, 1);
  return at::full_like(norm, limit).div_(norm.add(never_zero)).masked_fill_(norm.gt(limit).logical_not_(), 1);
}

double clip_norm(Shares& shares, double limit) {
  require(limit > 0, "gradients cannot be shortened to {}, must be more than 0", limit);
  const at::NoGradGuard no_grad;
  const double norm = gradient_norm(shares);
  if (const double factor = clip_factor(norm, limit); factor != 1)
    for (const auto& part : shares.parts())
      for (auto& share : part.flat->trained()) share.gradient.mul_(factor);
  return norm;
}

void clip_values(Shares& shares, double limit) {
  require(limit > 0, "gradients cannot be limited to {}, must be more than 0", limit);
  shares.require_gradients();
  clamp_gradients(shares, limit);
}

void clamp_gradients(Shares& shares, double limit) {
  const at::NoGradGuard no_grad;
  for (const auto& part : shares.parts())
    for (auto& share : part.flat->trained()) {
      const double bound = std::min(limit, largest(share.gradient.scalar_type()));
      share.gradient.clamp_(-bound, bound);
    }
}

void for_each_gradient(const Shares& shares, const std::function<void(const std::string& name, at::Tensor share)>& visit) {
  shares.require_gradients();
  const at::NoGradGuard no_grad;
  for (const auto& part : shares.parts())
    for (const auto& segment : part.flat->layout().segments)
      for (const auto& share : part.flat->trained())
        if (const auto own = overlap(share.share, segment); own && share.region == segment.region)
          visit(segment.placement.name, share.gradient.narrow(0, own->begin, own->length));
}

}  // namespace bonfire
