#include "bonfire/kernels/fp8.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "bonfire/base/error.h"
#include "bonfire/kernels/argument.h"
#include "bonfire/kernels/eight_bits.h"
#include "bonfire/kernels/operator.h"

namespace bonfire {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using TwoTensors = std::tuple<Tensor, Tensor>;
using ThreeTensors = std::tuple<Tensor, Tensor, Tensor>;

constexpr std::int64_t kHistory = Fp8Product::remembered - 1;  // calls

ThreeTensors quantize_composite(const Tensor& x, Tensor history, const OptionalTensor& later, std::int64_t position,
                                bool measure, bool wide_range, bool values, bool transposed) {
  if (later) position += later->item<std::int64_t>();
  const Tensor magnitude = largest_magnitude(x);
  const std::int64_t length = history.numel(), now = position % length, next = (position + 1) % length;
  Tensor used = magnitude;
  if (!measure) {
    // Neither the place that is written now nor the one that is written next.
    Tensor others = history.clone();
    others.narrow(0, now, 1).zero_();
    others.narrow(0, next, 1).zero_();
    used = others.amax().reshape({1});
  }
  history.narrow(0, now, 1).copy_(magnitude);
  const Tensor scale = scale_for(used, wide_range), eight = in_eight_bits(x, scale, wide_range);
  const Tensor none = at::empty({0}, eight.options());
  return {values ? eight : none, transposed ? eight.t().contiguous() : none, scale.reciprocal()};
}

TwoTensors quantize_rows_composite(const Tensor& x, bool wide_range) {
  const Tensor scale = scale_for(largest_magnitudes_of_rows(x), wide_range);
  return {in_eight_bits(x, scale.unsqueeze(1), wide_range), scale.reciprocal()};
}

Tensor as_given(const Tensor& values, const Tensor& inverse, bool by_column) {
  const Tensor scale = inverse.numel() == 1 ? inverse : by_column ? inverse.unsqueeze(0) : inverse.unsqueeze(1);
  return values.to(at::kFloat).mul(scale);
}

void fp8_product_composite(Tensor out, const Tensor& a, const Tensor& b, const Tensor& inverse_a, const Tensor& inverse_b,
                           const OptionalTensor& bias, const OptionalTensor& addend, bool) {
  Tensor sum = at::mm(as_given(a, inverse_a, false), as_given(b, inverse_b, true));
  if (bias) sum = sum.add(*bias);
  if (addend) sum = sum.add(*addend);
  out.copy_(sum);
}

struct ProductTerms {
  Tensor a, inverse_a;  // [rows, depth]
  Tensor b, inverse_b;  // [columns, depth]: its transpose is multiplied
  Addends addends{};
  bool short_sums = false;
};

void multiply_into(const Tensor& out, const ProductTerms& terms) {
  require_sizes({"fp8_product", "a", terms.a}, {any_size, any_size}, out);
  require_sizes({"fp8_product", "b", terms.b}, {any_size, terms.a.size(1)}, out);
  require_sizes({"fp8_product", "out", out}, {terms.a.size(0), terms.b.size(0)}, terms.a);
  const auto& [bias, residual] = terms.addends;
  if (bias.defined()) require_sizes({"fp8_product", "bias", bias}, {out.size(1)}, out);
  if (residual.defined()) require_sizes({"fp8_product", "residual", residual}, {out.size(0), out.size(1)}, out);
  const auto optional = [](const Tensor& x) { return x.defined() ? OptionalTensor(x) : std::nullopt; };
  BONFIRE_OPERATOR("bonfire::fp8_product_", void(Tensor, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                                 const OptionalTensor&, const OptionalTensor&, bool))
      .call(out, terms.a, terms.b.t(), terms.inverse_a, terms.inverse_b, optional(terms.addends.bias),
            optional(terms.addends.residual), terms.short_sums);
}

Tensor multiplied(const ProductTerms& terms, at::ScalarType type) {
  const Tensor out = at::empty({terms.a.size(0), terms.b.size(0)}, terms.a.options().dtype(type));
  multiply_into(out, terms);
  return out;
}

Quantized by_rows(const Tensor& x, bool wide_range) {
  auto [values, inverse] =
      BONFIRE_OPERATOR("bonfire::fp8_quantize_rows", TwoTensors(const Tensor&, bool)).call(x.contiguous(), wide_range);
  return {.values = values, .transposed = {}, .inverse = inverse};
}

}  // namespace

bool Fp8Product::suits(const Tensor& rows, const Tensor& weight) {
  const bool narrow = rows.scalar_type() == at::kBFloat16 || rows.scalar_type() == at::kHalf;
  const bool fits = weight.scalar_type() == rows.scalar_type() || weight.scalar_type() == at::kFloat8_e4m3fn;
  return narrow && fits && rows.size(0) % 16 == 0 && weight.size(0) % 16 == 0 && weight.size(1) % 16 == 0 &&
         rows.size(0) > 0;
}

Tensor Fp8Product::known_scales(const Tensor& weight) const {
  if (weight.scalar_type() != at::kFloat8_e4m3fn) return {};
  require(scales_ && scales_->inverse.defined(), "a weight of {} rows of {} in eight bits has no scales", weight.size(0),
          weight.size(1));
  const bool rows = recipe_.scales == Fp8Scales::row;
  require(scales_->inverse.numel() == (rows ? weight.size(0) : 1),
          "a weight of {} rows has {} scales; its products expect {}", weight.size(0), scales_->inverse.numel(),
          rows ? weight.size(0) : 1);
  return scales_->inverse;
}

Tensor Fp8Product::plain(const Tensor& weight, at::ScalarType type) const {
  const Tensor inverse = known_scales(weight);
  return inverse.defined() ? unscaled_weight(weight, inverse, type) : weight;
}

bool Fp8Product::knows(Role role) const {
  if (recipe_.scaling != Fp8Scaling::delayed || recipe_.scales != Fp8Scales::tensor) return false;
  const auto* const then = RepeatedScales::next_repeated();
  return then ? !then->measured : calls_[role] > 0;
}

// The history and the place in it that the next scale goes by, which is counted unless it is made again.
RepeatedScales::Call Fp8Product::next_call(Role role, bool measured) {
  const auto then = RepeatedScales::repeated();
  const RepeatedScales::Call call =
      then ? *then : RepeatedScales::Call{.history = history_[role], .position = calls_[role]++, .measured = measured};
  RepeatedScales::note(call);
  return call;
}

KnownScale Fp8Product::next(Role role) {
  const auto call = next_call(role, /*measured=*/false);
  return {call.history, call.position, later_.defined() ? later_.select(0, role) : Tensor()};
}

Quantized Fp8Product::quantize(Role role, const Tensor& given, bool values, bool transposed) {
  const bool wide_range = role == gradient_of_output;
  const Tensor x = given.contiguous();
  const bool delayed = recipe_.scaling == Fp8Scaling::delayed;
  auto& history = history_[role];
  if (!history.defined() || history.device() != x.device()) {
    history = at::zeros({kHistory}, x.options().dtype(at::kFloat));
    calls_[role] = 0;
  }
  // The first call has nothing to go by.
  const auto call = next_call(role, !delayed || calls_[role] == 0);
  auto [straight, turned, inverse] =
      BONFIRE_OPERATOR("bonfire::fp8_quantize",
                       ThreeTensors(const Tensor&, Tensor, const OptionalTensor&, std::int64_t, bool, bool, bool, bool))
          .call(x, call.history, later_.defined() ? OptionalTensor(later_.select(0, role)) : std::nullopt, call.position,
                call.measured, wide_range, values, transposed);
  return {straight, turned, inverse};
}

Tensor Fp8Product::memory() const {
  const Tensor all = at::zeros({roles, remembered}, at::kDouble);
  for (std::int64_t role = 0; role < roles; ++role) {
    const auto& history = history_[static_cast<std::size_t>(role)];
    if (!history.defined()) continue;
    all.select(0, role).narrow(0, 0, kHistory).copy_(history);
    const std::int64_t later = later_.defined() ? later_.select(0, role).item<std::int64_t>() : 0;
    all.select(0, role).narrow(0, kHistory, 1).fill_(calls_[static_cast<std::size_t>(role)] + later);
  }
  return all;
}

void Fp8Product::set_memory(const Tensor& memory, at::Device device) {
  const Tensor all = memory.to(at::kCPU);
  for (std::int64_t role = 0; role < roles; ++role) {
    const auto at = static_cast<std::size_t>(role);
    const auto calls = static_cast<std::int64_t>(all.select(0, role).narrow(0, kHistory, 1).item<double>());
    if (calls <= 0) continue;
    const Tensor values = all.select(0, role).narrow(0, 0, kHistory).to(at::kFloat);
    // Captured calls read this memory, and begin to count where they were captured.
    if (history_[at].defined() && history_[at].device() == device)
      history_[at].copy_(values);
    else
      history_[at] = values.to(device);
    if (later_.defined())
      later_.select(0, role).fill_(calls - calls_[at]);
    else
      calls_[at] = calls;
  }
}

Tensor Fp8Product::forward(const Quantized& x, const Tensor& weight, const Addends& addends, at::ScalarType type) {
  const Tensor known = known_scales(weight);
  const bool rows = recipe_.scales == Fp8Scales::row;
  const Quantized right = known.defined() ? Quantized{.values = weight, .transposed = {}, .inverse = known}
                          : rows          ? by_rows(weight, false)
                                          : quantize(Role::weight, weight, true, false);
  return multiplied({.a = x.values,
                     .inverse_a = x.inverse,
                     .b = right.values,
                     .inverse_b = right.inverse,
                     .addends = addends,
                     .short_sums = true},
                    type);
}

Fp8Product::Forward Fp8Product::forward(const Tensor& x, const Tensor& weight, const Addends& addends, bool keep) {
  const bool rows = recipe_.scales == Fp8Scales::row;
  const Quantized left = rows ? by_rows(x, false) : quantize(input, x, true, keep);
  Forward result{.out = forward(left, weight, addends, x.scalar_type()), .x = {}};
  if (keep && !rows) result.x = {.values = {}, .transposed = left.transposed, .inverse = left.inverse};
  return result;
}

Quantized Fp8Product::gradient(const Tensor& dy) {
  if (recipe_.scales == Fp8Scales::tensor) return quantize(gradient_of_output, dy, true, true);
  // Scales of the weight's rows are those of what is summed over here, so they go into the gradient before it is rounded: as
  // parts of the largest, which narrow types hold whatever the weight's magnitude is.
  const bool known = scales_ && scales_->inverse.defined();
  return by_rows(known ? dy.mul(scales_->inverse.div(scales_->inverse.max()).to(dy.scalar_type())) : dy, true);
}

Tensor Fp8Product::input_gradient(const Quantized& dy, at::ScalarType type, const Tensor& weight) {
  const bool rows = recipe_.scales == Fp8Scales::row;
  const Tensor known = known_scales(weight);
  ProductTerms terms{.a = dy.values, .inverse_a = dy.inverse, .b = {}, .inverse_b = {}};
  if (known.defined()) {
    terms.b = transposed_weight(weight);
    terms.inverse_b = rows ? known.max().expand({weight.size(1)}).contiguous() : known;
  } else {
    const Quantized right = rows ? by_rows(weight.t(), false) : quantize(Role::weight, weight, false, true);
    terms.b = rows ? right.values : right.transposed;
    terms.inverse_b = right.inverse;
  }
  return multiplied(terms, type);
}

Tensor Fp8Product::weight_gradient(const Quantized& dy, const Tensor& plain_dy, const Quantized& kept, const Tensor& rows,
                                   const WeightGradientOptions& options) {
  if (recipe_.scales == Fp8Scales::row) return bonfire::weight_gradient(plain_dy, rows, options);
  const Quantized x = kept.transposed.defined() ? kept : quantize(input, rows, false, true);
  ProductTerms terms{.a = dy.transposed, .inverse_a = dy.inverse, .b = x.transposed, .inverse_b = x.inverse};
  if (!options.sink) return multiplied(terms, at::kFloat).to(options.type);
  bool fresh = false;
  const Tensor buffer = options.sink->buffer(fresh);
  if (!fresh) terms.addends.residual = buffer;
  multiply_into(buffer, terms);
  options.sink->arrived();
  return {};
}

TORCH_LIBRARY_IMPL(bonfire, CompositeExplicitAutograd, m) {
  m.impl("fp8_quantize", quantize_composite);
  m.impl("fp8_quantize_rows", quantize_rows_composite);
  m.impl("fp8_product_", fp8_product_composite);
}

}  // namespace bonfire
