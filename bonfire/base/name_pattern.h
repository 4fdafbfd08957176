#pragma once

#include <string_view>

#include "bonfire/base/api.h"

// Patterns that stand for names with dots in them.
namespace bonfire {

// Whether one part of a name, between dots, is what a pattern says: * stands for any letters.
BONFIRE_API bool fits_part(std::string_view pattern, std::string_view part);

// Whether the name begins with these parts: "blocks.*.attention" of "blocks.3.attention.qkv.weight".
BONFIRE_API bool begins_with_parts(std::string_view pattern, std::string_view name);

// Whether the name ends with these parts: "self_attn.*_proj" of "model.layers.3.self_attn.q_proj".
BONFIRE_API bool ends_with_parts(std::string_view pattern, std::string_view name);

}  // namespace bonfire
