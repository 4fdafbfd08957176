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

// The first of every `every` blocks is recomputed, in full or in part. In part: for models with an activation between two
// products; throws ConfigError for others.
BONFIRE_API void recompute(ModelDescription& model, Recompute what, std::int64_t every = 1);
// Whether a model of this type can be recomputed in part.
BONFIRE_API bool recomputes_in_part(ModelType type);

}  // namespace bonfire::plan
