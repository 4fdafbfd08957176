#include "bonfire/kernels/activated_product.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "bonfire/base/error.h"
#include "bonfire/kernels/argument.h"
#include "bonfire/kernels/operator.h"
#include "bonfire/kernels/product.h"

namespace bonfire {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using ThreeTensors = std::tuple<Tensor, Tensor, Tensor>;

using Takes = bool(const Tensor&, const Tensor&, const OptionalTensor&, bool);
using Forward = std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const OptionalTensor&, bool);
using TakesBackward = bool(const Tensor&, const Tensor&, const Tensor&, bool);
using Backward = ThreeTensors(const Tensor&, const Tensor&, const Tensor&, bool, bool);

Activation activation_of(bool gated) { return gated ? Activation::swiglu : Activation::gelu; }

// A device without kernels for it.
bool takes_nothing(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, bool gated) { return false; }
bool takes_nothing_back(const Tensor& dy, const Tensor& weight, const Tensor& wide, bool gated) { return false; }

std::tuple<Tensor, Tensor> forward_composite(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, bool gated) {
  const Tensor wide = product(x, weight.t(), {.bias = bias.value_or(Tensor())});
  return {wide, activate(activation_of(gated), wide)};
}

ThreeTensors backward_composite(const Tensor& dy, const Tensor& weight, const Tensor& wide, bool gated, bool again) {
  const Tensor d_active = product(dy, weight);
  const auto d = (again ? activate_exchange : activate_backward)(activation_of(gated), d_active, wide);
  const Tensor none = at::empty({0}, dy.options());
  return {d.wide, again ? d_active : none, d.column_sums.defined() ? d.column_sums : none};
}

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
  if (!BONFIRE_OPERATOR("bonfire::takes_activated_product", Takes).call(x, weight, added, gated)) return {};
  auto [wide, active] = BONFIRE_OPERATOR("bonfire::activated_product", Forward).call(x, weight, added, gated);
  return ActivatedProduct{wide, active};
}

std::optional<ActivatedProductGradient> activated_product_backward(Activation activation,
                                                                   const ActivatedProductBackward& of) {
  const bool gated = activation == Activation::swiglu;
  require_sizes({"activated_product_backward", "dy", of.dy}, {any_size, any_size}, of.dy);
  require_sizes({"activated_product_backward", "weight", of.weight}, {of.dy.size(1), any_size}, of.dy);
  require_sizes({"activated_product_backward", "wide", of.wide}, {of.dy.size(0), of.weight.size(1) * (gated ? 2 : 1)},
                of.dy);
  if (!BONFIRE_OPERATOR("bonfire::takes_activated_product_backward", TakesBackward).call(of.dy, of.weight, of.wide, gated))
    return {};
  auto [d, active, sums] =
      BONFIRE_OPERATOR("bonfire::activated_product_backward", Backward).call(of.dy, of.weight, of.wide, gated, of.again);
  return ActivatedProductGradient{.d = {d, gated ? Tensor() : sums}, .active = of.again ? active : Tensor()};
}

TORCH_LIBRARY_IMPL(bonfire, CompositeExplicitAutograd, m) {
  m.impl("takes_activated_product", takes_nothing);
  m.impl("activated_product", forward_composite);
  m.impl("takes_activated_product_backward", takes_nothing_back);
  m.impl("activated_product_backward", backward_composite);
}

}  // namespace bonfire
