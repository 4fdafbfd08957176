#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include "bonfire/kernels/fused_linear.h"
#include "bonfire/nn/sequence_regions.h"

// What products of split weights ask of what they are given, before ranks exchange anything: a rank that refuses alone would
// leave the others waiting, and a bias or residual of other sizes would be broadcast.
namespace bonfire {

// x is what lies between split layers, or, with all positions, inside of them.
void require_between_layers(const char* op, const at::Tensor& x, const TensorRanks& ranks);
// A weight of `width` columns beside x, and a bias of its rows where there is one.
void require_split_product(const char* op, const at::Tensor& x, std::int64_t width, const at::Tensor& weight,
                           const at::Tensor& bias);
void require_norm_between(const char* op, const at::Tensor& x, const NormWeights& norm);
// A target for each position of all ranks.
void require_targets_of_rows(const at::Tensor& x, const at::Tensor& target, const TensorRanks& ranks);
// The packed product of attention: behind `queries` elements as many of keys as of values.
void require_shared_heads(const at::Tensor& packed, std::int64_t queries);
// The sizes, with `last` columns, of what lies between split layers for an x that has all positions.
std::vector<std::int64_t> sizes_between_layers(const at::Tensor& x, std::int64_t last, const TensorRanks& ranks);

}  // namespace bonfire
