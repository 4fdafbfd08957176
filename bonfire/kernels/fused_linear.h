#pragma once

#include <functional>
#include <memory>

#include <ATen/core/Tensor.h>

#include "bonfire/base/api.h"
#include "bonfire/kernels/activation.h"
#include "bonfire/kernels/fp8.h"
#include "bonfire/kernels/norm.h"
#include "bonfire/kernels/product.h"

// Products with what comes before them, as one node of autograd's graph each. What a product reads is not kept for backward,
// unless asked for: it is made again there, in a pass that reads its input anyway.
namespace bonfire {

struct NormWeights {
  at::Tensor weight{};  // undefined: there is no norm
  at::Tensor bias{};    // undefined: RMSNorm
  NormOptions options{};
};

struct Streamed {
  at::Tensor out;
  at::Tensor stream;  // x, to go on with beside it
};

// norm(x) weight^T + bias. `options` has no residual.
BONFIRE_API Streamed normed_linear(const at::Tensor& x, const NormWeights& norm, const at::Tensor& weight,
                                   const LinearOptions& options);

struct FeedForwardParts {
  NormWeights norm{};  // without a weight x is read as it is
  at::Tensor up{};     // [wide, in]
  LinearOptions up_options{};
  Activation activation = Activation::swiglu;
  at::Tensor down{};  // [out, what the activation makes]
  LinearOptions down_options{};
  bool residual = true;  // x is added to the result, inside of the product; otherwise it comes back beside it
  // Told, before it is saved, of what the activation reads. It is that of feed_forward_wide().
  std::function<void(const at::Tensor& wide)> reads{};
};
// activation(norm(x) up^T + bias) down^T + bias, and x. What lies between the two products is read by nothing else, so it
// need not exist as a whole, or in more than eight bits, where products are made in fp8.
BONFIRE_API Streamed feed_forward(const at::Tensor& x, const FeedForwardParts& parts);

// What the activation reads, once more. Outside autograd.
BONFIRE_API at::Tensor feed_forward_wide(const at::Tensor& x, const FeedForwardParts& parts);

}  // namespace bonfire
