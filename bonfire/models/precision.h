#pragma once

#include <memory>
#include <vector>

#include "bonfire/base/api.h"
#include "bonfire/kernels/fp8.h"
#include "bonfire/plan/activations.h"

namespace bonfire {

class Model;

// From now on the products of the blocks are made in fp8, forward and backward. Embedding, head, norms, attention, weights,
// gradients and what is communicated stay as they are.
BONFIRE_API void use_fp8(Model& model, const Fp8Recipe& recipe);

// The calls of a model's fp8 products in a step that is captured: each replay is so many calls more, though the host makes
// none. REQUIRES: made before the capture, and lives as long as it is replayed.
class BONFIRE_API CapturedCalls {
 public:
  CapturedCalls(Model& model, at::Device device);

  // Stream: as the last work of the step.
  void issue();
  // The capture has ended, well or not.
  void captured();
  void failed();

 private:
  std::vector<std::shared_ptr<Fp8Product>> products_;
  std::vector<Fp8Product::Calls> before_;
  at::Tensor later_, each_;  // of all products, by role: calls by replays so far, and by each
};

// What forward keeps from now on of the blocks' norms and activations. Backward makes the rest again.
BONFIRE_API void keep_for_backward(Model& model, plan::Kept kept);

}  // namespace bonfire
