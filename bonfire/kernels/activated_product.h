#pragma once

#include <optional>

#include <ATen/core/Tensor.h>

#include "bonfire/base/api.h"
#include "bonfire/kernels/activation.h"

// Products that apply an activation to what they make, or its gradient, before it goes to memory: where a device has a
// kernel for the shapes, otherwise nothing. Outside autograd.
namespace bonfire {

struct ActivatedProduct {
  at::Tensor wide, active;
};
// wide = x weight^T + bias for x [rows, in] and weight [out, in], and active = activate(wide). The bias may be undefined.
BONFIRE_API std::optional<ActivatedProduct> activated_product(Activation activation, const at::Tensor& x,
                                                              const at::Tensor& weight, const at::Tensor& bias);

struct ActivatedProductGradient {
  ActivationGradient d;
  at::Tensor active;  // defined where asked for `again`
};
struct ActivatedProductBackward {
  at::Tensor dy, weight;  // [rows, out] and [out, in]: their product is the activation's gradient
  at::Tensor wide;        // what the activation read: [rows, in], or twice as many columns for SwiGLU
  bool again = false;
};
BONFIRE_API std::optional<ActivatedProductGradient> activated_product_backward(Activation activation,
                                                                               const ActivatedProductBackward& of);

}  // namespace bonfire
