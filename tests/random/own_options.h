#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "bonfire/shard/engine.h"

namespace bonfire::cases {

// Options that follow from a Unit's path. Their type is what it is without them.
std::function<UnitOptions(const std::string& path, torch::nn::Module& module)> own_options(std::uint64_t seed);

}  // namespace bonfire::cases
