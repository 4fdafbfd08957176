#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>

#include "bonfire/base/api.h"

// Weights that are kept in eight bits (e4m3) and scaled to fill their range: by one scale for all elements, or one for each
// row. A rank may have any part of a weight; all must know its largest magnitudes before it is rounded.
namespace bonfire {

// What the elements of a weight are multiplied by to be what it stands for, as its owner knows it now.
struct WeightScales {
  at::Tensor inverse;  // fp32: one element, or one for each row; undefined: the weight is not in eight bits
};

// Elements [first, first + length) of a weight, in a row; `each` of its elements share a scale.
struct WeightPart {
  at::Tensor elements;
  std::int64_t first = 0;
  std::int64_t each = 1;
};

// Raises those of the weight's `magnitudes` (fp32) that are smaller than the part's.
BONFIRE_API void note_magnitudes(const at::Tensor& magnitudes, const WeightPart& part);
// The part in eight bits, into `out`.
BONFIRE_API void round_scaled(const at::Tensor& out, const WeightPart& part, const at::Tensor& magnitudes);
// The inverse scales that round_scaled has used; the least there is for zeros, which any scale leaves what they are.
BONFIRE_API at::Tensor inverse_scales(const at::Tensor& magnitudes);

// [columns, rows] of a weight [rows, columns] in eight bits.
BONFIRE_API at::Tensor transposed_weight(const at::Tensor& weight);
// What it stands for, in another type.
BONFIRE_API at::Tensor unscaled_weight(const at::Tensor& weight, const at::Tensor& inverse, at::ScalarType type);

}  // namespace bonfire
