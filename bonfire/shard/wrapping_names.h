#pragma once

#include <string>
#include <vector>

#include "bonfire/shard/wrap.h"

namespace bonfire {

// What a Wrapping may name of a module: paths of modules and of parameters, and types of Units.
struct WrappingNames {
  std::vector<std::string> modules{}, parameters{}, types{};

  bool empty() const { return modules.empty() && parameters.empty() && types.empty(); }
};

// All that `module` has.
BONFIRE_API WrappingNames names_of(torch::nn::Module& module);
// Those that `wrapping` names.
WrappingNames names_in(const Wrapping& wrapping);
// Those of `names` that `known` has not.
WrappingNames names_missing(const WrappingNames& names, const WrappingNames& known);
// Throws ConfigError for the first name in `wrapping` that `known` has not. `holder`: what has the known ones.
void require_known_names(const Wrapping& wrapping, const WrappingNames& known, const std::string& holder);
// The wrapping of a module that does not have these names. Types of which it has none choose none of its Units.
Wrapping without_names(Wrapping wrapping, const WrappingNames& absent);

}  // namespace bonfire
