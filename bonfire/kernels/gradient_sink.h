#pragma once

#include <memory>

#include <ATen/core/Tensor.h>

#include "bonfire/base/api.h"

namespace bonfire {

// Where a layer writes a parameter's gradient itself instead of returning it to autograd: the products that make weight
// gradients then write straight into a flat buffer, and nothing is zeroed, copied or added up afterwards.
class BONFIRE_API GradientSink {
 public:
  virtual ~GradientSink() = default;
  // A tensor with the parameter's shape, of any floating type. Sets `fresh` where nothing has been written since the last
  // step: the layer then overwrites, otherwise it adds.
  virtual at::Tensor buffer(bool& fresh) = 0;
  // The gradient of this use of the parameter is in the buffer.
  virtual void arrived() = 0;
};

// Hands `gradient` to the sink. For gradients that are too small to be computed in place.
BONFIRE_API void deliver(GradientSink& sink, const at::Tensor& gradient);
// The same where there is a sink; otherwise the gradient comes back, for autograd, in the parameter's type.
at::Tensor parameter_gradient(const std::shared_ptr<GradientSink>& sink, const at::Tensor& gradient, at::ScalarType type);

}  // namespace bonfire
