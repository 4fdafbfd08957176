#pragma once

#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "bonfire/base/api.h"
#include "bonfire/kernels/gradient_sink.h"
#include "bonfire/kernels/scaled_weight.h"

namespace torch::nn {
class Module;
}

namespace bonfire {

class Fp8Product;

// A layer that can write the gradients of its parameters into sinks.
class BONFIRE_API GradientSlots {
 public:
  virtual ~GradientSlots() = default;
  // The place of the sink for this very tensor; nullptr where it is none of this layer's parameters.
  virtual std::shared_ptr<GradientSink>* slot(const at::Tensor& parameter) = 0;
  // The same of a weight's scales, where the layer can read it in eight bits.
  virtual std::shared_ptr<WeightScales>* scales(const at::Tensor&) { return nullptr; }
  // What makes the products with this weight in fp8; null: nothing does.
  virtual std::shared_ptr<Fp8Product> fp8_product(const at::Tensor&) { return nullptr; }
};

// Gives the parameter with this path inside `module` a sink (nullptr takes it off). From the next forward on its gradient
// goes there and autograd sees none. Returns how many layers use the parameter, which is how often `arrived` is called in a
// backward that reaches them all: 2 for an embedding that is tied to the head. 0: its layer knows no sinks, nothing changed.
BONFIRE_API int set_gradient_sink(torch::nn::Module& module, const std::string& parameter,
                                  const std::shared_ptr<GradientSink>& sink);
// Tells the layers of a parameter that is to come in eight bits where its scales are. Returns how many there are; 0: its
// layer cannot read it.
BONFIRE_API int set_weight_scales(torch::nn::Module& module, const std::string& parameter,
                                  const std::shared_ptr<WeightScales>& scales);
// What makes the products with a parameter in fp8, layer by layer.
BONFIRE_API std::vector<std::shared_ptr<Fp8Product>> fp8_products(torch::nn::Module& module, const std::string& parameter);

}  // namespace bonfire
