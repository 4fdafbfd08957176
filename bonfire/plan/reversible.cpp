#include "bonfire/plan/reversible.h"

#include <algorithm>

#include "bonfire/plan/adapters.h"

namespace bonfire::plan {

bool is_reversible(const ModelDescription& model, std::size_t unit) {
  return model.spec.reversible && unit < model.units.size() && model.units[unit].kind == UnitKind::block;
}

bool ends_reversible(const ModelDescription& model, std::size_t unit) {
  return is_reversible(model, unit) && !is_reversible(model, unit + 1);
}

void make_reversible(ModelDescription& model) {
  const auto& spec = model.spec;
  const std::int64_t query = spec.heads * spec.head_dim, key = spec.kv_heads * spec.head_dim;
  const std::int64_t wide = spec.type == ModelType::llama ? 2 * spec.ffn : spec.ffn;
  for (auto& unit : model.units) {
    if (unit.kind == UnitKind::embedding || unit.kind == UnitKind::block) unit.output_elements = 2 * spec.dim;
    if (unit.kind != UnitKind::block) continue;
    std::int64_t attention = 2 * query + 2 * key, feed = wide;  // kept by each part, beside its input
    for (const auto& layer : adapted_layers(unit)) {
      auto& part = layer.starts_with("attention.") ? attention : feed;
      part += spec.adapter.rank * static_cast<std::int64_t>(adapters_of(unit, layer).size());
      if (layer == "attention.qkv" || layer == "feed.gate_up" || layer == "feed.up") part += spec.dim;
      if (layer == "feed.down") part += spec.ffn;
    }
    // Both streams of the result or of the input, whichever is made again, and their gradient. Then the part's own result
    // and the gradients in it.
    const std::int64_t streams = 4 * spec.dim;
    // An adapter has kept what would be made again.
    const bool again = spec.type != ModelType::llama || adapters_of(unit, "feed.down").empty();
    const std::int64_t in_attention = attention + 2 * query + 2 * key, in_feed = feed + wide + (again ? spec.ffn : 0);
    unit.working_elements = streams + std::max(in_attention, in_feed);
    unit.working_beside_weight = unit.working_elements;
    unit.saved_elements = unit.saved_statistics = 0;
  }
}

}  // namespace bonfire::plan
