#include "bonfire/nn/gradient_slots.h"

#include <utility>

#include <torch/nn/module.h>

#include "bonfire/base/error.h"

namespace bonfire {

namespace {

// Every layer that may have a place for the parameter with this path.
template <class Body>
void for_each_layer(torch::nn::Module& module, const std::string& parameter, const Body& body) {
  const auto parameters = module.named_parameters();
  const at::Tensor* tensor = parameters.find(parameter);
  require(tensor, "the module {} has no parameter \"{}\"", module.name(), parameter);
  const auto offer_to = [&](torch::nn::Module& layer) {
    if (auto* slots = dynamic_cast<GradientSlots*>(&layer)) body(*slots, *tensor);
  };
  offer_to(module);
  for (const auto& child : module.modules(/*include_self=*/false)) offer_to(*child);
}

// Puts `value` into every layer's place for it. `place` finds that, or nothing.
template <class Value, class Place>
int offer(torch::nn::Module& module, const std::string& parameter, const Value& value, const Place& place) {
  int users = 0;
  for_each_layer(module, parameter, [&](GradientSlots& layer, const at::Tensor& tensor) {
    auto* found = place(layer, tensor);
    if (!found) return;
    *found = value;
    ++users;
  });
  return users;
}

}  // namespace

int set_gradient_sink(torch::nn::Module& module, const std::string& parameter, const std::shared_ptr<GradientSink>& sink) {
  return offer(module, parameter, sink, [](GradientSlots& layer, const at::Tensor& tensor) { return layer.slot(tensor); });
}

int set_weight_scales(torch::nn::Module& module, const std::string& parameter, const std::shared_ptr<WeightScales>& scales) {
  return offer(module, parameter, scales,
               [](GradientSlots& layer, const at::Tensor& tensor) { return layer.scales(tensor); });
}

std::vector<std::shared_ptr<Fp8Product>> fp8_products(torch::nn::Module& module, const std::string& parameter) {
  std::vector<std::shared_ptr<Fp8Product>> products;
  for_each_layer(module, parameter, [&](GradientSlots& layer, const at::Tensor& tensor) {
    if (auto product = layer.fp8_product(tensor)) products.push_back(std::move(product));
  });
  return products;
}

}  // namespace bonfire
