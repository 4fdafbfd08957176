#pragma once

#include "bonfire/base/api.h"
#include "bonfire/kernels/fp8.h"
#include "bonfire/models/model.h"
#include "bonfire/plan/activations.h"

namespace bonfire {

// From now on the products of the blocks are made in fp8, forward and backward. Embedding, head, norms, attention, weights,
// gradients and what is communicated stay as they are.
BONFIRE_API void use_fp8(Model& model, const Fp8Recipe& recipe);

// What forward keeps from now on of the blocks' norms and activations. Backward makes the rest again.
BONFIRE_API void keep_for_backward(Model& model, plan::Kept kept);

}  // namespace bonfire
