#pragma once

#include <memory>

#include <ATen/core/Tensor.h>

#include "bonfire/base/api.h"
#include "bonfire/kernels/activation.h"
#include "bonfire/kernels/fp8.h"
#include "bonfire/kernels/norm.h"
#include "bonfire/kernels/product.h"

// Products with what comes before them, as one node of autograd's graph each. What the product reads is not kept for
// backward, unless asked for: it is made again there, in a pass that reads its input anyway.
namespace bonfire {

struct NormWeights {
  at::Tensor weight;
  at::Tensor bias{};  // undefined: RMSNorm
  NormOptions options{};
};

struct NormedLinear {
  at::Tensor out;       // norm(x) weight^T + bias
  at::Tensor stream;    // x, to go on with beside it
  at::Tensor active{};  // the activation of `out`, where it was asked for and came with the product; outside autograd
};
// `options` has no residual.
BONFIRE_API NormedLinear normed_linear(const at::Tensor& x, const NormWeights& norm, const at::Tensor& weight,
                                       const LinearOptions& options);

// activation(wide) weight^T + bias + residual, where `wide` comes out of normed_linear or any other function.
BONFIRE_API at::Tensor activated_linear(const at::Tensor& wide, Activation activation, const at::Tensor& weight,
                                        const LinearOptions& options);

}  // namespace bonfire
