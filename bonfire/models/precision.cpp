#include "bonfire/models/precision.h"

#include "bonfire/nn/layers.h"

namespace bonfire {

namespace {

template <class Body>
void for_each_product_of_blocks(Model& model, const Body& body) {
  const auto& units = model.description().units;
  std::size_t at = 0;
  for (const auto& layer : model.layers()) {
    while (at < units.size() && units[at].kind == plan::UnitKind::root) ++at;
    if (units[at++].kind != plan::UnitKind::block) continue;
    for (const auto& module : layer->modules())
      if (auto* linear = dynamic_cast<nn::LinearImpl*>(module.get())) body(*linear);
  }
}

}  // namespace

void use_fp8(Model& model, const Fp8Recipe& recipe) {
  for_each_product_of_blocks(model, [&](nn::LinearImpl& linear) { linear.set_fp8(std::make_shared<Fp8Product>(recipe)); });
}

void keep_for_backward(Model& model, plan::Kept kept) {
  for_each_product_of_blocks(model, [&](nn::LinearImpl& linear) {
    linear.set_keep_norm(kept == plan::Kept::all);
    linear.set_keep_activation(kept != plan::Kept::least);
  });
}

}  // namespace bonfire
