#include "bonfire/kernels/scaled_weight.h"

#include <algorithm>

#include <ATen/ops/maximum.h>
#include <torch/library.h>

#include "bonfire/base/error.h"
#include "bonfire/kernels/agreed_math.h"
#include "bonfire/kernels/argument.h"
#include "bonfire/kernels/eight_bits.h"
#include "bonfire/kernels/operator.h"

namespace bonfire {
namespace {

using at::Tensor;

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
    const Tensor found = largest_magnitudes_of_rows(x.narrow(0, at, elements).view({rows, -1}));
    Tensor known = magnitudes.narrow(0, row, rows);
    at::maximum_out(known, known, found);
  });
}

void round_composite(Tensor out, const Tensor& x, const Tensor& magnitudes, std::int64_t first, std::int64_t each) {
  const Tensor scales = scale_for(magnitudes, false);
  for_each_stretch(x.numel(), first, each, [&](std::int64_t at, std::int64_t elements, std::int64_t row, std::int64_t rows) {
    const Tensor stretch = x.narrow(0, at, elements).view({rows, -1});
    out.narrow(0, at, elements).copy_(in_eight_bits(stretch, scales.narrow(0, row, rows).view({-1, 1}), false).view({-1}));
  });
}

Tensor transposed_composite(const Tensor& x) { return x.view(at::kByte).t().contiguous().view(x.scalar_type()); }

void require_part(const char* op, const WeightPart& part, const Tensor& magnitudes) {
  require_sizes({op, "part", part.elements}, {any_size}, magnitudes);
  require_contiguous({op, "part", part.elements});
  require_sizes({op, "magnitudes", magnitudes}, {any_size}, part.elements);
  require(magnitudes.scalar_type() == at::kFloat && magnitudes.is_contiguous(),
          "{}: the magnitudes are {}; allowed: fp32, contiguous", op, c10::toString(magnitudes.scalar_type()));
  const std::int64_t end = part.first + part.elements.numel();
  require(part.first >= 0 && part.each > 0 && (end + part.each - 1) / part.each <= magnitudes.numel(),
          "{}: elements {} to {} of a weight, {} to a scale, beside {} magnitudes; allowed: a magnitude for each scale", op,
          part.first, end, part.each, magnitudes.numel());
}

}  // namespace

void note_magnitudes(const Tensor& magnitudes, const WeightPart& part) {
  require_part("note_magnitudes", part, magnitudes);
  BONFIRE_OPERATOR("bonfire::fp8_note_magnitudes_", void(Tensor, const Tensor&, std::int64_t, std::int64_t))
      .call(magnitudes, part.elements, part.first, part.each);
}

void round_scaled(const Tensor& out, const WeightPart& part, const Tensor& magnitudes) {
  require_part("round_scaled", part, magnitudes);
  require_sizes({"round_scaled", "out", out}, part.elements.sizes(), part.elements);
  require_contiguous({"round_scaled", "out", out});
  require(out.scalar_type() == at::kFloat8_e4m3fn, "round_scaled: out is {}; allowed: e4m3",
          c10::toString(out.scalar_type()));
  BONFIRE_OPERATOR("bonfire::fp8_round_", void(Tensor, const Tensor&, const Tensor&, std::int64_t, std::int64_t))
      .call(out, part.elements, magnitudes, part.first, part.each);
}

// Zeros are the same times anything: the least there is, so that no row's scale is measured against theirs.
Tensor inverse_scales(const Tensor& magnitudes) {
  return scale_for(magnitudes, false).reciprocal().masked_fill_(magnitudes.eq(0), 1 / most_scale);
}

Tensor transposed_weight(const Tensor& weight) {
  require_sizes({"transposed_weight", "weight", weight}, {any_size, any_size}, weight);
  return BONFIRE_OPERATOR("bonfire::fp8_transposed", Tensor(const Tensor&)).call(weight);
}

Tensor unscaled_weight(const Tensor& weight, const Tensor& inverse, at::ScalarType type) {
  require_sizes({"unscaled_weight", "weight", weight}, {any_size, any_size}, weight);
  if (inverse.numel() != 1) require_sizes({"unscaled_weight", "inverse", inverse}, {weight.size(0)}, weight);
  return weight.to(at::kFloat).mul_(inverse.view({-1, 1})).to(type);
}

TORCH_LIBRARY_IMPL(bonfire, CompositeExplicitAutograd, m) {
  m.impl("fp8_note_magnitudes_", note_magnitudes_composite);
  m.impl("fp8_round_", round_composite);
  m.impl("fp8_transposed", transposed_composite);
}

}  // namespace bonfire
