#pragma once

#include <memory>

#include <ATen/core/Tensor.h>

#include "bonfire/base/api.h"
#include "bonfire/kernels/gradient_sink.h"

namespace bonfire {

// Rows of `weight` [count, dim] for the int64 `tokens` [...]: [..., dim]. Backward adds the rows of a token in the order in
// which they come, in fp32 at least, so that equal runs give equal bits, and rounds their sum once. A token that is no row
// is an error that names it.
BONFIRE_API at::Tensor embedding(const at::Tensor& weight, const at::Tensor& tokens,
                                 const std::shared_ptr<GradientSink>& weight_sink = nullptr);

}  // namespace bonfire
