#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include <ATen/core/Tensor.h>

namespace bonfire {

// Puts a gate into autograd's graph around the tensors that need a gradient: they are replaced by others of the same memory,
// and backward calls `passed` once, when all gradients that will come back through the gate have come and before anything
// behind it runs. Returns whether there is a gate; none where no tensor needs a gradient.
bool put_gate(std::vector<at::Tensor>& tensors, std::function<void()> passed);

// A tensor that a gate has replaced: the caller's own, and what forward got in its place. Both have the same memory, so what
// forward writes in place there, the caller's tensor has too, and has to have its history. The caller's is not kept alive.
class Replaced {
 public:
  Replaced(const at::Tensor& outside, const at::Tensor& inside);

  bool written() const;
  const at::Tensor& inside() const { return inside_; }
  // Whether the caller's tensor can be given another history: it is neither a view nor a leaf.
  bool can_follow() const;
  // The caller's tensor, where there is still one, gets the history of this one.
  void follow(const at::Tensor& beyond) const;

 private:
  using Weak = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  Weak outside_;
  at::Tensor inside_;
  std::int64_t version_;
};

}  // namespace bonfire
