#pragma once

#include <ATen/core/Tensor.h>

#include "bonfire/base/api.h"

namespace bonfire {

// Sum of the squares of all elements of all tensors, as one fp64 element on their device. Accumulated in double in a fixed
// order, whatever the number of threads. REQUIRES: at least one, and all on one device.
BONFIRE_API at::Tensor sum_of_squares(at::TensorList tensors);

}  // namespace bonfire
