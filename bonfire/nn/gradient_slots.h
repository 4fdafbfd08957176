#pragma once

#include <memory>
#include <string>

#include <ATen/core/Tensor.h>

#include "bonfire/base/api.h"
#include "bonfire/kernels/gradient_sink.h"

namespace torch::nn {
class Module;
}

namespace bonfire {

// A layer that can write the gradients of its parameters into sinks.
class BONFIRE_API GradientSlots {
 public:
  virtual ~GradientSlots() = default;
  // The place of the sink for this very tensor; nullptr where it is none of this layer's parameters.
  virtual std::shared_ptr<GradientSink>* slot(const at::Tensor& parameter) = 0;
};

// Gives the parameter with this path inside `module` a sink (nullptr takes it off). From the next forward on its gradient
// goes there and autograd sees none. Returns how many layers use the parameter, which is how often `arrived` is called in a
// backward that reaches them all: 2 for an embedding that is tied to the head. 0: its layer knows no sinks, nothing changed.
BONFIRE_API int set_gradient_sink(torch::nn::Module& module, const std::string& parameter,
                                  const std::shared_ptr<GradientSink>& sink);

}  // namespace bonfire
