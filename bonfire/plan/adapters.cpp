#include "bonfire/plan/adapters.h"

#include <algorithm>
#include <cmath>
#include <set>

#include <fmt/ranges.h>

#include "bonfire/base/error.h"
#include "bonfire/base/name_pattern.h"
#include "bonfire/plan/step_events.h"

namespace bonfire::plan {
namespace {

constexpr std::string_view weight_end = ".weight";

std::string_view without_end(std::string_view name) {
  return name.ends_with(weight_end) ? name.substr(0, name.size() - weight_end.size()) : name;
}

std::string last_part(std::string_view name) { return std::string(name.substr(name.rfind('.') + 1)); }

// The weight of a product, as a parameter of its Unit's own.
bool is_linear(const UnitDescription& unit, const ParameterDescription& parameter) {
  return unit.kind != UnitKind::root && parameter.shape.size() == 2 && parameter.name.ends_with(weight_end) &&
         parameter.name != "tokens.weight";
}

class Choice {
 public:
  explicit Choice(const ModelDescription& model) : match_(model.spec.adapter.match) {
    std::set<std::string> layers;
    std::vector<bool> used(match_.size(), false);
    for (const auto& unit : model.units)
      for (const auto& parameter : unit.parameters) {
        if (!is_linear(unit, parameter)) continue;
        for (const auto& slice : parameter.slices) {
          layers.insert(last_part(without_end(slice.name)));
          for (std::size_t at = 0; at < match_.size(); ++at)
            used[at] = used[at] || names(match_[at], unit, parameter, slice);
        }
      }
    for (std::size_t at = 0; at < match_.size(); ++at)
      if (!used[at])
        fail_config(
            "adapter.match holds \"{}\", which names no linear layer of this model; allowed: {}, and longer ends of their "
            "names, such as \"{}\"",
            match_[at], fmt::join(layers, " | "), example(model));
  }

  bool takes(const UnitDescription& unit, const ParameterDescription& parameter, const PublicSlice& slice) const {
    if (match_.empty()) return unit.kind == UnitKind::block;
    return std::any_of(match_.begin(), match_.end(),
                       [&](const auto& pattern) { return names(pattern, unit, parameter, slice); });
  }

 private:
  static bool names(const std::string& pattern, const UnitDescription& unit, const ParameterDescription& parameter,
                    const PublicSlice& slice) {
    return ends_with_parts(pattern, without_end(slice.name)) ||
           ends_with_parts(pattern, without_end(full_name(unit, parameter)));
  }
  // Of a layer in a block, without its beginning.
  static std::string example(const ModelDescription& model) {
    for (const auto& unit : model.units)
      for (const auto& parameter : unit.parameters)
        if (unit.kind == UnitKind::block && is_linear(unit, parameter))
          return std::string(without_end(parameter.slices.front().name));
    return "";
  }

  const std::vector<std::string>& match_;
};

ParameterDescription matrix(std::string name, std::vector<std::int64_t> shape, Init init, std::string public_name) {
  const std::int64_t rows = shape[0];
  return {.name = std::move(name), .shape = std::move(shape), .init = init, .slices = {{std::move(public_name), 0, rows}}};
}

// Both of one public weight.
void append(std::vector<ParameterDescription>& parameters, const ParameterDescription& weight, const PublicSlice& slice,
            std::int64_t rank) {
  const std::string_view layer = without_end(slice.name);
  const std::string linear(without_end(weight.name)), own = last_part(layer);
  const auto outside = [&](const char* which) { return fmt::format("{}{}.lora_{}.weight", peft_prefix, layer, which); };
  const std::int64_t in = weight.shape[1];
  // As wide as the uniform numbers that PEFT draws.
  const Init normal{InitKind::normal, 1 / std::sqrt(3.0 * static_cast<double>(in))};
  parameters.push_back(matrix(adapter_parameter(linear, own, 'a'), {rank, in}, normal, outside("A")));
  parameters.push_back(matrix(adapter_parameter(linear, own, 'b'), {slice.rows, rank}, Init{InitKind::zeros}, outside("B")));
}

// What forward keeps more: what an adapted product reads, where nobody else keeps it, and what lies between the two
// matrices.
void keep_more(const ModelDescription& model, UnitDescription& unit) {
  const auto& spec = model.spec;
  std::int64_t adapters = 0, largest = 0;
  for (const auto& parameter : unit.parameters) {
    if (!is_adapter(parameter.name)) continue;
    ++adapters;
    largest = std::max(largest, parameter.elements());
  }
  if (adapters == 0) return;
  adapters /= 2;
  const auto layers = adapted_layers(unit);
  const auto adapted = [&](std::string_view layer) {
    return std::find(layers.begin(), layers.end(), layer) != layers.end();
  };
  const bool up = adapted("feed.gate_up") || adapted("feed.up"), down = adapted("feed.down");
  unit.saved_elements += adapters * spec.adapter.rank;
  unit.weight_elements = largest;
  unit.weight_apart = false;
  if (unit.kind == UnitKind::head) {
    // Logits are made as a whole, and their gradient beside them.
    unit.working_elements = std::max(unit.working_elements, unit.output_elements);
    unit.working_beside_weight = unit.working_elements;
    return;
  }
  if (unit.kind != UnitKind::block || spec.type == ModelType::vgg) return;
  if (spec.type == ModelType::mlp) {
    if (!up && down) unit.saved_elements -= spec.dim;
  } else {
    if (adapted("attention.qkv")) unit.saved_elements += spec.dim;
    if (up) unit.saved_elements += spec.dim;
  }
  if (down) unit.saved_elements += spec.ffn;
  if (!up && !down) return;
  // What the activation made is not made again beside its gradient; and when an adapter's gradients are made, what the
  // activation read has gone.
  if (down && spec.type == ModelType::llama) unit.working_elements -= spec.ffn;
  unit.working_beside_weight = down ? spec.ffn : spec.dim;
}

}  // namespace

bool is_adapter(std::string_view parameter) { return parameter.find(".adapters.") != std::string_view::npos; }

std::string adapter_parameter(std::string_view linear, std::string_view adapter, char which) {
  return fmt::format("{}.adapters.{}.{}", linear, adapter, which);
}

std::vector<AdapterPlace> adapters_of(const UnitDescription& unit, std::string_view linear) {
  const ParameterDescription* weight = nullptr;
  for (const auto& parameter : unit.parameters)
    if (parameter.name.size() == linear.size() + weight_end.size() && parameter.name.starts_with(linear) &&
        parameter.name.ends_with(weight_end))
      weight = &parameter;
  std::vector<AdapterPlace> places;
  if (!weight) return places;
  for (const auto& slice : weight->slices) {
    const std::string layer(without_end(slice.name)), own = last_part(layer);
    const std::string name = adapter_parameter(linear, own, 'a');
    if (std::any_of(unit.parameters.begin(), unit.parameters.end(), [&](const auto& one) { return one.name == name; }))
      places.push_back({own, layer, slice.begin, slice.rows, slice.transposed});
  }
  return places;
}

std::vector<std::string> adapted_layers(const UnitDescription& unit) {
  std::vector<std::string> layers;
  for (const auto& parameter : unit.parameters) {
    if (!parameter.name.ends_with(weight_end)) continue;
    const std::string layer(without_end(parameter.name));
    if (!adapters_of(unit, layer).empty()) layers.push_back(layer);
  }
  return layers;
}

void add_adapters(ModelDescription& model) {
  const Choice choice(model);
  const std::int64_t rank = model.spec.adapter.rank;
  for (auto& unit : model.units) {
    std::vector<ParameterDescription> all, waiting;
    for (auto& parameter : unit.parameters) {
      parameter.trained = false;
      // They come after the layer's bias.
      if (!waiting.empty() && !parameter.name.ends_with(".bias")) {
        all.insert(all.end(), waiting.begin(), waiting.end());
        waiting.clear();
      }
      if (is_linear(unit, parameter))
        for (const auto& slice : parameter.slices) {
          if (!choice.takes(unit, parameter, slice)) continue;
          append(waiting, parameter, slice, rank);
          unit.product_flops += 2.0 * static_cast<double>(rank) * static_cast<double>(parameter.shape[1] + slice.rows);
        }
      all.push_back(std::move(parameter));
    }
    all.insert(all.end(), waiting.begin(), waiting.end());
    unit.parameters = std::move(all);
    keep_more(model, unit);
  }
}

}  // namespace bonfire::plan
