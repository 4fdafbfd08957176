#pragma once

#include <ATen/core/Tensor.h>

#include "bonfire/base/api.h"

namespace bonfire {

// silu(gate) * up, where the last dimension of `gate_up` holds all gates, then all ups.
BONFIRE_API at::Tensor swiglu(const at::Tensor& gate_up);

// GPT-2's GELU, with a hyperbolic tangent.
BONFIRE_API at::Tensor gelu(const at::Tensor& x);

}  // namespace bonfire
