#pragma once

#include <ATen/core/Tensor.h>

#include "bonfire/base/api.h"
#include "bonfire/base/random.h"

namespace bonfire::nn {

// Fills a tensor of any floating type with deviation * random.normal(i) for element i in row-major order. The tensor may be
// a view, for example a transposed one; drawn in double and rounded once, so fp32 weights are the fp64 ones rounded.
BONFIRE_API void fill_normal(const at::Tensor& tensor, const Random& random, double deviation);

// Fills a vector or matrix that is a part of a larger one with what that would have there.
struct PartOfTensor {
  std::int64_t begin[2] = {0, 0};  // in the whole, by dimension
  std::int64_t row = 1;            // elements of a row of the whole; 1 for a vector
};
BONFIRE_API void fill_normal(const at::Tensor& tensor, const PartOfTensor& part, const Random& random, double deviation);

}  // namespace bonfire::nn
