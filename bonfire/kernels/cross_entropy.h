#pragma once

#include <memory>

#include <ATen/core/Tensor.h>

#include "bonfire/base/api.h"
#include "bonfire/base/limits.h"
#include "bonfire/kernels/gradient_sink.h"

namespace bonfire {

struct CrossEntropyOptions {
  std::int64_t ignore_index = -100;
  bool mean = true;  // over the targets that are not ignored; otherwise the sum
};

// The loss of `logits` [..., classes] against the class numbers `target` [...]: one fp32 element, fp64 for fp64 logits. Sums
// in double, in a fixed order. Where every target is ignored, the mean is not a number and the gradient 0, as in torch.
BONFIRE_API at::Tensor cross_entropy(const at::Tensor& logits, const at::Tensor& target, const CrossEntropyOptions& options);

struct LinearCrossEntropyOptions {
  CrossEntropyOptions loss{};
  std::shared_ptr<GradientSink> weight_sink{};
  std::int64_t most_logit_bytes = bonfire::most_logit_bytes;
};

// cross_entropy(x weight^T, target), which holds the logits once: their gradient takes their place while a row is in the
// cache, so that softmax and its backward are one pass. Where the logits would take more than `most_logit_bytes`, they are
// made, used and dropped in chunks of rows: the gradients of x and the weight are then made in forward, and backward only
// multiplies them by the gradient of the loss.
BONFIRE_API at::Tensor linear_cross_entropy(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& target,
                                            const LinearCrossEntropyOptions& options);

}  // namespace bonfire
