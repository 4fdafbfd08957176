#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>

#include "bonfire/base/api.h"
#include "bonfire/base/random.h"

namespace bonfire {

struct DropoutOptions {
  double p = 0;            // probability that an element becomes 0; the others grow by 1 / (1 - p)
  Random random{0};        // forked for the step, the Unit and the region
  std::int64_t first = 0;  // number of x's first element in the whole batch: a slice of a batch drops what the batch drops
};

// Element i is dropped where word (first + i) of the generator says so. Backward draws the same words again: no mask is
// kept.
BONFIRE_API at::Tensor dropout(const at::Tensor& x, const DropoutOptions& options);

}  // namespace bonfire
