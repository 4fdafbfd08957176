#include "bonfire/nn/gradient_slots.h"

#include <torch/nn/module.h>

#include "bonfire/base/error.h"

namespace bonfire {

namespace {

// Puts `value` into every layer's place for the parameter with this path. `place` finds it, or nothing.
template <class Value, class Place>
int offer(torch::nn::Module& module, const std::string& parameter, const Value& value, const Place& place) {
  const auto parameters = module.named_parameters();
  const at::Tensor* tensor = parameters.find(parameter);
  require(tensor, "the module {} has no parameter \"{}\"", module.name(), parameter);
  int users = 0;
  const auto offer_to = [&](torch::nn::Module& layer) {
    auto* slots = dynamic_cast<GradientSlots*>(&layer);
    auto* found = slots ? place(*slots, *tensor) : nullptr;
    if (!found) return;
    *found = value;
    ++users;
  };
  offer_to(module);
  for (const auto& child : module.modules(/*include_self=*/false)) offer_to(*child);
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

}  // namespace bonfire
