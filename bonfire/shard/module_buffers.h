#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

#include "bonfire/comm/group.h"
#include "bonfire/shard/engine.h"

namespace bonfire {

// The buffers of a module (running statistics and the like): not trained, and equal on all ranks because one of them sends
// its own to the others.
class ModuleBuffers {
 public:
  // Floating-point ones are cast, where the precision says so.
  ModuleBuffers(torch::nn::Module& module, const ShardOptions& options);
  // All take those of rank 0. Collective.
  void broadcast(const Group& group);
  const std::vector<ModuleBuffer>& all() const { return buffers_; }

 private:
  std::vector<ModuleBuffer> buffers_;
};

}  // namespace bonfire
