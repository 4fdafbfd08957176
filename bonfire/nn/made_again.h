#pragma once

#include <functional>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include "bonfire/kernels/repeated_scales.h"
#include "bonfire/nn/save_scope.h"

namespace bonfire {

// Recomputation of single tensors: for its lifetime, what operations save is kept as ever, but for the tensors that it is
// told of. Those are made again from the inputs when backward asks for them. What makes them is to run for the first time
// inside of it as well, before all else that is made in fp8. Without gradients it does nothing.
class MadeAgain {
 public:
  // Makes the first `count` of the tensors from the inputs, to the last bit as they were. It runs without autograd.
  using Again = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>& inputs, std::size_t count)>;
  MadeAgain(const std::vector<at::Tensor>& inputs, Again again);
  ~MadeAgain();

  // All of them, before they are saved. Once.
  void drop(const std::vector<at::Tensor>& tensors);

 private:
  class Pieces;
  class Listener;
  std::unique_ptr<Listener> listener_;  // null: there are no gradients
  std::unique_ptr<SaveScope> scope_;
  std::unique_ptr<RepeatedScales::Scope> scales_;
};

}  // namespace bonfire
