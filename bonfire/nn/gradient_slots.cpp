#include "bonfire/nn/gradient_slots.h"

#include <torch/nn/module.h>

#include "bonfire/base/error.h"

namespace bonfire {

int set_gradient_sink(torch::nn::Module& module, const std::string& parameter, const std::shared_ptr<GradientSink>& sink) {
  const auto parameters = module.named_parameters();
  const at::Tensor* tensor = parameters.find(parameter);
  require(tensor, "the module {} has no parameter \"{}\"", module.name(), parameter);
  int users = 0;
  const auto offer = [&](torch::nn::Module& layer) {
    auto* slots = dynamic_cast<GradientSlots*>(&layer);
    auto* slot = slots ? slots->slot(*tensor) : nullptr;
    if (!slot) return;
    *slot = sink;
    ++users;
  };
  offer(module);
  for (const auto& child : module.modules(/*include_self=*/false)) offer(*child);
  return users;
}

}  // namespace bonfire
