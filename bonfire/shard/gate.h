#pragma once

#include <functional>
#include <vector>

#include <ATen/core/Tensor.h>

namespace bonfire {

// Puts a gate into autograd's graph around the tensors that need a gradient: they are replaced by others of the same memory,
// and backward calls `passed` once, when all gradients that will come back through the gate have come and before anything
// behind it runs. Returns whether there is a gate; none where no tensor needs a gradient.
bool put_gate(std::vector<at::Tensor>& tensors, std::function<void()> passed);

}  // namespace bonfire
