#pragma once

#include <ATen/core/Tensor.h>

#include "bonfire/base/api.h"

namespace bonfire {

enum class Activation { swiglu, gelu };

// silu(gate) * up, where the last dimension of `gate_up` holds all gates, then all ups.
BONFIRE_API at::Tensor swiglu(const at::Tensor& gate_up);

// GPT-2's GELU, with a hyperbolic tangent.
BONFIRE_API at::Tensor gelu(const at::Tensor& x);

// What nodes are made of, outside autograd. All contiguous.
BONFIRE_API at::Tensor activate(Activation activation, const at::Tensor& wide);
struct ActivationGradient {
  at::Tensor wide;
  at::Tensor column_sums;  // of that, where they cost nothing: in fp32 at least
};
BONFIRE_API ActivationGradient activate_backward(Activation activation, const at::Tensor& d_out, const at::Tensor& wide);
// The same, leaving the activation itself in `d_out`.
ActivationGradient activate_exchange(Activation activation, const at::Tensor& d_out, const at::Tensor& wide);

}  // namespace bonfire
