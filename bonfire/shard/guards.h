#pragma once

#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "bonfire/comm/group.h"
#include "bonfire/shard/engine.h"

namespace bonfire {

// What would go wrong without a word is said instead.

// Throws ConfigError for a parameter that is not where the ranks of `group` compute.
void require_on_device(const Group& group, const std::string& name, const at::Tensor& parameter);

// For parameters that are sharded: warns where most of them are the root's, although they lie in parts of it that could be
// marked.
void warn_of_unmarked(torch::nn::Module& module, const std::vector<ModuleGroup>& groups, const ShardOptions& options);

// What a program should do whose gradients nobody has used, where ranks hold only their shares of them.
inline constexpr const char* use_our_optimizers =
    "update with an optimizer of Bonfire's (AdamW, Adam, Sgd): torch::optim finds no gradients and trains nothing";

}  // namespace bonfire
