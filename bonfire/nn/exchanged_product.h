#pragma once

#include <ATen/core/Tensor.h>

#include "bonfire/nn/sequence_regions.h"

// Products and the exchange before or after them, outside autograd. With `ranks.chunks` they are cut: a chunk is multiplied
// while the next one is gathered, and summed while the next one is multiplied.
namespace bonfire {

struct GatheredProduct {
  at::Tensor out;   // [batch, all positions, columns of b]
  at::Tensor read;  // [batch, all positions, width], if it was asked for
};
struct GatheredOptions {
  at::Tensor bias{};
  bool keep_read = false;
};
// What lies between split layers, of all positions, times b [width, columns].
GatheredProduct gathered_product(const at::Tensor& x, const at::Tensor& b, const GatheredOptions& options,
                                 const TensorRanks& ranks);

// The sum over the ranks of x b, as it lies between split layers, for x [.., all positions, rows of b].
at::Tensor summed_product(const at::Tensor& x, const at::Tensor& b, const TensorRanks& ranks);

}  // namespace bonfire
