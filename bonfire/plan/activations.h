#pragma once

#include "bonfire/base/api.h"
#include "bonfire/plan/model.h"

namespace bonfire::plan {

// What a block keeps for backward of what is cheap to make again from the rest.
enum class Kept {
  least,        // nothing of that: what describe() says
  activations,  // the activation of the feed-forward part
  all           // norms too
};

BONFIRE_API void keep_for_backward(ModelDescription& model, Kept kept);

}  // namespace bonfire::plan
