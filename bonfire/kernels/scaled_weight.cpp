#include "bonfire/kernels/scaled_weight.h"

#include <algorithm>

#include <ATen/ops/maximum.h>
#include <torch/library.h>

#include "bonfire/kernels/operator.h"

namespace bonfire {
namespace {

using at::Tensor;

constexpr double largest = 448;  // of e4m3

// What elements are multiplied by so that their magnitude becomes the largest number; 1 where nothing has a magnitude.
Tensor scales_for(const Tensor& magnitudes) {
  return magnitudes.reciprocal().mul(largest).masked_fill(magnitudes.eq(0), 1.0);
}

// Calls `body(number, elements, scales)` for stretches of whole rows, [scales, each], and for what is left at both ends.
template <class Body>
void for_each_stretch(std::int64_t length, std::int64_t first, std::int64_t each, const Body& body) {
  for (std::int64_t at = 0; at < length;) {
    const std::int64_t row = (first + at) / each, into = (first + at) % each;
    const std::int64_t rows = into == 0 ? (length - at) / each : 0;
    const std::int64_t elements = rows > 0 ? rows * each : std::min(each - into, length - at);
    body(at, elements, row, std::max<std::int64_t>(rows, 1));
    at += elements;
  }
}

void note_magnitudes_composite(Tensor magnitudes, const Tensor& x, std::int64_t first, std::int64_t each) {
  for_each_stretch(x.numel(), first, each, [&](std::int64_t at, std::int64_t elements, std::int64_t row, std::int64_t rows) {
    const Tensor found = x.narrow(0, at, elements).view({rows, -1}).abs().amax(1).to(at::kFloat);
    Tensor known = magnitudes.narrow(0, row, rows);
    at::maximum_out(known, known, found);
  });
}

void round_composite(Tensor out, const Tensor& x, const Tensor& magnitudes, std::int64_t first, std::int64_t each) {
  const Tensor scales = scales_for(magnitudes);
  for_each_stretch(x.numel(), first, each, [&](std::int64_t at, std::int64_t elements, std::int64_t row, std::int64_t rows) {
    const Tensor scaled =
        x.narrow(0, at, elements).view({rows, -1}).to(at::kFloat).mul(scales.narrow(0, row, rows).view({-1, 1}));
    out.narrow(0, at, elements).copy_(scaled.clamp_(-largest, largest).view({-1}));
  });
}

Tensor transposed_composite(const Tensor& x) { return x.view(at::kByte).t().contiguous().view(x.scalar_type()); }

}  // namespace

void note_magnitudes(const Tensor& magnitudes, const WeightPart& part) {
  BONFIRE_OPERATOR("bonfire::fp8_note_magnitudes_", void(Tensor, const Tensor&, std::int64_t, std::int64_t))
      .call(magnitudes, part.elements, part.first, part.each);
}

void round_scaled(const Tensor& out, const WeightPart& part, const Tensor& magnitudes) {
  BONFIRE_OPERATOR("bonfire::fp8_round_", void(Tensor, const Tensor&, const Tensor&, std::int64_t, std::int64_t))
      .call(out, part.elements, magnitudes, part.first, part.each);
}

Tensor inverse_scales(const Tensor& magnitudes) { return scales_for(magnitudes).reciprocal(); }

Tensor transposed_weight(const Tensor& weight) {
  return BONFIRE_OPERATOR("bonfire::fp8_transposed", Tensor(const Tensor&)).call(weight);
}

Tensor unscaled_weight(const Tensor& weight, const Tensor& inverse, at::ScalarType type) {
  return weight.to(at::kFloat).mul_(inverse.view({-1, 1})).to(type);
}

TORCH_LIBRARY_IMPL(bonfire, CompositeExplicitAutograd, m) {
  m.impl("fp8_note_magnitudes_", note_magnitudes_composite);
  m.impl("fp8_round_", round_composite);
  m.impl("fp8_transposed", transposed_composite);
}

}  // namespace bonfire
