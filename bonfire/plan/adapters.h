#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "bonfire/base/api.h"
#include "bonfire/plan/model.h"

// Low-rank adapters in a description. A packed weight has one for each of the public weights in it. Their parameters come
// after those of the layer: "attention.qkv.adapters.q_proj.a" [rank, in] and "...b" [rows, rank], known outside by the names
// that PEFT gives them.
namespace bonfire::plan {

// Adds those that the model's spec asks for, and freezes everything else. Throws ConfigError for a pattern that names no
// layer. REQUIRES: the parameters are whole.
void add_adapters(ModelDescription& model);

// One adapter of the linear layer with this path in the Unit ("attention.qkv").
struct AdapterPlace {
  std::string name;         // "q_proj"
  std::string public_name;  // of the layer: "model.layers.0.self_attn.q_proj"
  std::int64_t begin = 0;   // in the rows of the weight
  std::int64_t rows = 0;
  bool transposed = false;  // the weight outside is [in, out]
};
BONFIRE_API std::vector<AdapterPlace> adapters_of(const UnitDescription& unit, std::string_view linear);
// Paths in the Unit of its linear layers that have some.
BONFIRE_API std::vector<std::string> adapted_layers(const UnitDescription& unit);

// Whether a parameter of this name, in the Unit or in the model, is an adapter's.
BONFIRE_API bool is_adapter(std::string_view parameter);

// The path in the Unit of one of an adapter's two matrices.
BONFIRE_API std::string adapter_parameter(std::string_view linear, std::string_view adapter, char which);

// Public names of parameters of adapters begin so.
inline constexpr std::string_view peft_prefix = "base_model.model.";

}  // namespace bonfire::plan
