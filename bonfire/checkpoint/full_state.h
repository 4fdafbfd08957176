#pragma once

#include <functional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "bonfire/base/api.h"
#include "bonfire/checkpoint/checkpoints.h"
#include "bonfire/comm/world.h"

// State that is divided over ranks, whole on one of them: for files of other programs, or to look at it.
namespace bonfire {

struct StateTensor {
  std::string name;   // in the whole model
  std::string kind;   // "value", "buffer", "exp_avg", ...
  at::Tensor values;  // on the host
};

struct FullStateOptions {
  int rank = 0;  // that gets it
  // Which tensors; all, where there is none. By default without what only helps to go on to the same bit.
  std::function<bool(const std::string& name, const std::string& kind)> wanted{};
};

// Hands one tensor after the other, those of a Unit together, to `take` on one rank, which holds no more than one of them at
// a time. Collective; `take` is called on that rank alone.
BONFIRE_API void stream_state(const World& world, const std::vector<Sliced*>& tensors,
                              const std::function<void(StateTensor tensor)>& take, const FullStateOptions& options = {});
// All of them at once; nothing on the other ranks. Collective.
BONFIRE_API std::vector<StateTensor> full_state(const World& world, const std::vector<Sliced*>& tensors,
                                                const FullStateOptions& options = {});

}  // namespace bonfire
