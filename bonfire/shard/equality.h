#pragma once

#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "bonfire/comm/group.h"

namespace bonfire {

struct NamedTensor {
  std::string name;
  at::Tensor tensor;
};

// Collective: throws unless all ranks have the same names, shapes and dtypes, naming the first difference.
void require_same_structure(const Group& group, const std::vector<NamedTensor>& tensors);
// Collective: throws unless all ranks have the same bits, naming the first tensor that differs and the ranks.
// REQUIRES: the same structure.
void require_same_values(const Group& group, const std::vector<NamedTensor>& tensors);
// Collective: all ranks take rank 0's values.
void broadcast_values(const Group& group, const std::vector<NamedTensor>& tensors);

}  // namespace bonfire
