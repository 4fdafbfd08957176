#include "bonfire/kernels/quantized_activation.h"

#include <optional>
#include <tuple>

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "bonfire/kernels/argument.h"
#include "bonfire/kernels/operator.h"

namespace bonfire {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using ThreeTensors = std::tuple<Tensor, Tensor, Tensor>;
using FiveTensors = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

struct Rounding {
  bool wide_range = false, values = true, transposed = true;
};
ThreeTensors rounded(const Tensor& x, const Tensor& history, const OptionalTensor& later, std::int64_t position,
                     const Rounding& how) {
  return BONFIRE_OPERATOR("bonfire::fp8_quantize",
                          ThreeTensors(const Tensor&, Tensor, const OptionalTensor&, std::int64_t, bool, bool, bool, bool))
      .call(x, history, later, position, /*measure=*/false, how.wide_range, how.values, how.transposed);
}

OptionalTensor optional(const Tensor& x) { return x.defined() ? OptionalTensor(x) : OptionalTensor(); }

Tensor swiglu(const Tensor& gate_up) { return BONFIRE_OPERATOR("bonfire::swiglu", Tensor(const Tensor&)).call(gate_up); }

ThreeTensors swiglu_composite(const Tensor& gate_up, Tensor history, const OptionalTensor& later, std::int64_t position,
                              bool transposed) {
  return rounded(swiglu(gate_up), history, later, position, {.transposed = transposed});
}

FiveTensors swiglu_backward_composite(const Tensor& d_out, const Tensor& gate_up, OptionalTensor history,
                                      const OptionalTensor& later, std::int64_t position, Tensor gradient_history,
                                      const OptionalTensor& gradient_later, std::int64_t gradient_position) {
  const Tensor d = BONFIRE_OPERATOR("bonfire::swiglu_backward", Tensor(const Tensor&, const Tensor&)).call(d_out, gate_up);
  const auto [values, transposed, inverse] =
      rounded(d, gradient_history, gradient_later, gradient_position, {.wide_range = true});
  if (!history) return {at::empty({0}, d_out.options()), at::empty({0}, d_out.options()), values, transposed, inverse};
  const auto [none, again, inverse_again] = rounded(swiglu(gate_up), *history, later, position, {.values = false});
  return {again, inverse_again, values, transposed, inverse};
}

}  // namespace

Quantized quantized_swiglu(const Tensor& wide, const KnownScale& scale, bool transposed) {
  require_sizes({"quantized_swiglu", "wide", wide}, {any_size, any_size}, wide);
  require_halves({"quantized_swiglu", "wide", wide});
  auto [values, turned, inverse] =
      BONFIRE_OPERATOR("bonfire::fp8_swiglu", ThreeTensors(const Tensor&, Tensor, const OptionalTensor&, std::int64_t, bool))
          .call(wide, scale.history, optional(scale.later), scale.position, transposed);
  return {values, transposed ? turned : Tensor(), inverse};
}

QuantizedSwigluBackward quantized_swiglu_backward(const Tensor& d_activated, const Tensor& wide,
                                                  const QuantizedSwigluScales& scales) {
  require_sizes({"quantized_swiglu_backward", "wide", wide}, {any_size, any_size}, wide);
  require_sizes({"quantized_swiglu_backward", "d_activated", d_activated},
                {wide.size(0), require_halves({"quantized_swiglu_backward", "wide", wide})}, wide);
  const auto& [activated_scale, gradient] = scales;
  auto [activated, activated_inverse, values, transposed, inverse] =
      BONFIRE_OPERATOR("bonfire::fp8_swiglu_backward",
                       FiveTensors(const Tensor&, const Tensor&, OptionalTensor, const OptionalTensor&, std::int64_t, Tensor,
                                   const OptionalTensor&, std::int64_t))
          .call(d_activated, wide, optional(activated_scale.history), optional(activated_scale.later),
                activated_scale.position, gradient.history, optional(gradient.later), gradient.position);
  QuantizedSwigluBackward result{.activated = {}, .d_wide = {values, transposed, inverse}};
  if (activated_scale.history.defined())
    result.activated = {.values = {}, .transposed = activated, .inverse = activated_inverse};
  return result;
}

TORCH_LIBRARY_IMPL(bonfire, CompositeExplicitAutograd, m) {
  m.impl("fp8_swiglu", swiglu_composite);
  m.impl("fp8_swiglu_backward", swiglu_backward_composite);
}

}  // namespace bonfire
