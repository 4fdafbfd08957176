#pragma once

#include <memory>

#include <ATen/core/Tensor.h>

#include "bonfire/base/api.h"
#include "bonfire/kernels/gradient_sink.h"

namespace bonfire {

struct NormOptions {
  double eps = 1e-5;
  std::shared_ptr<GradientSink> weight_sink{};
  std::shared_ptr<GradientSink> bias_sink{};
};

// The norm of a residual stream and the stream itself, which goes on beside it. Both come out of one node, so that backward
// adds their gradients in the same pass that it makes the norm's.
struct NormedStream {
  at::Tensor normed;
  at::Tensor stream;
};

// Weight and bias may be fp32 beside narrower x, and are then not rounded. Their gradients are sums in fp32 at least.

// normed = x / rms(x) * weight over the last dimension. With a residual, the stream is x + residual and the norm is of that.
BONFIRE_API NormedStream rms_norm_stream(const at::Tensor& x, const at::Tensor& residual, const at::Tensor& weight,
                                         const NormOptions& options);
BONFIRE_API at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, const NormOptions& options);

// The same for layer norm, without a residual.
BONFIRE_API NormedStream layer_norm_stream(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                                           const NormOptions& options);
BONFIRE_API at::Tensor layer_norm(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                                  const NormOptions& options);

// What nodes are made of, outside autograd. With a bias it is the layer norm, and there is a mean.
struct NormForward {
  at::Tensor normed;
  at::Tensor mean;
  at::Tensor rstd;
};
NormForward norm_forward(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, double eps);

struct NormSaved {
  at::Tensor x;
  at::Tensor weight;
  at::Tensor bias{};  // asked for only where the norm is wanted again
  at::Tensor mean{};
  at::Tensor rstd;
  bool again = false;  // whether to make the norm again, in the pass that reads x anyway
  bool sums = false;   // of a layer norm: whether to sum the gradient of x over rows
};
struct NormGradients {
  at::Tensor x, weight, bias, normed, sums;
};
// `d_stream`, where defined, is added to the gradient of x.
NormGradients norm_backward(const at::Tensor& d_normed, const at::Tensor& d_stream, const NormSaved& saved);

}  // namespace bonfire
