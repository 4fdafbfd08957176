#include "bonfire/kernels/activated_product.h"

#include <torch/library.h>

#include "bonfire/base/error.h"
#include "bonfire/kernels/argument.h"
#include "bonfire/kernels/operator.h"

namespace bonfire {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using Tensors = std::vector<Tensor>;

using Forward = Tensors(const Tensor&, const Tensor&, const OptionalTensor&, bool);
using Backward = Tensors(const Tensor&, const Tensor&, const Tensor&, bool, bool);

// A device without kernels for it.
Tensors no_product(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, bool gated) { return {}; }
Tensors no_gradient(const Tensor& dy, const Tensor& weight, const Tensor& wide, bool gated, bool again) { return {}; }

}  // namespace

std::optional<ActivatedProduct> activated_product(Activation activation, const Tensor& x, const Tensor& weight,
                                                  const Tensor& bias) {
  require_sizes({"activated_product", "x", x}, {any_size, any_size}, x);
  require_sizes({"activated_product", "weight", weight}, {any_size, x.size(1)}, x);
  if (bias.defined()) require_sizes({"activated_product", "bias", bias}, {weight.size(0)}, x);
  const bool gated = activation == Activation::swiglu;
  require(!gated || weight.size(0) % 2 == 0, "activated_product: the weight has {} rows; allowed: as many gates as ups",
          weight.size(0));
  const OptionalTensor added = bias.defined() ? OptionalTensor(bias) : std::nullopt;
  const Tensors made = BONFIRE_OPERATOR("bonfire::activated_product", Forward).call(x, weight, added, gated);
  if (made.empty()) return {};
  return ActivatedProduct{made[0], made[1]};
}

std::optional<ActivatedProductGradient> activated_product_backward(Activation activation,
                                                                   const ActivatedProductBackward& of) {
  const bool gated = activation == Activation::swiglu;
  require_sizes({"activated_product_backward", "dy", of.dy}, {any_size, any_size}, of.dy);
  require_sizes({"activated_product_backward", "weight", of.weight}, {of.dy.size(1), any_size}, of.dy);
  require_sizes({"activated_product_backward", "wide", of.wide}, {of.dy.size(0), of.weight.size(1) * (gated ? 2 : 1)},
                of.dy);
  const Tensors made =
      BONFIRE_OPERATOR("bonfire::activated_product_backward", Backward).call(of.dy, of.weight, of.wide, gated, of.again);
  if (made.empty()) return {};
  return ActivatedProductGradient{.d = {made[0], gated ? Tensor() : made[2]}, .active = of.again ? made[1] : Tensor()};
}

TORCH_LIBRARY_IMPL(bonfire, CompositeExplicitAutograd, m) {
  m.impl("activated_product", no_product);
  m.impl("activated_product_backward", no_gradient);
}

}  // namespace bonfire
