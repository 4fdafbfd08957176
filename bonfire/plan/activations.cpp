#include "bonfire/plan/activations.h"

namespace bonfire::plan {

void keep_for_backward(ModelDescription& model, Kept kept) {
  const auto& spec = model.spec;
  if (kept == Kept::least || spec.type == ModelType::vgg) return;
  const std::int64_t norms = kept == Kept::all && spec.type != ModelType::mlp ? 2 * spec.dim : 0;
  for (auto& unit : model.units) {
    if (unit.kind != UnitKind::block) continue;
    unit.saved_elements += norms + spec.ffn;
    // The activation's own gradient has gone when its weight's is made.
    unit.working_beside_weight -= spec.ffn;
  }
}

}  // namespace bonfire::plan
