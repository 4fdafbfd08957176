#pragma once

#include <memory>

#include "bonfire/kernels/backward_node.h"

// The gradient of a product's bias are sums over rows of the gradient of its result. Whoever makes that gradient sees every
// row of it, so it can hand the sums over beside it.
namespace bonfire {

struct KnownSums {
  at::Tensor gradient;
  at::Tensor sums;
};

// A node of a product.
struct ProductNode : BackwardNode {
  std::shared_ptr<KnownSums> known;  // null where nothing is wanted beside the gradient of its result

  void expect_sums(const at::Tensor& bias) {
    if (bias.defined() && bias.requires_grad()) known = std::make_shared<KnownSums>();
  }
  // The sums of `gradient`, which arrived, where they were handed over with this very tensor; otherwise undefined.
  at::Tensor handed_over(const at::Tensor& gradient) {
    if (!known) return {};
    const at::Tensor sums = known->gradient.is_same(gradient) ? known->sums : at::Tensor();
    *known = {};
    return sums;
  }
};

// Where to hand over what is known of the gradient of x; null where nobody waits for them.
inline std::shared_ptr<KnownSums> sums_wanted(const at::Tensor& x) {
  const auto& maker = x.grad_fn();
  const auto* node = dynamic_cast<const ProductNode*>(maker.get());
  return node && x.output_nr() == 0 ? node->known : nullptr;
}

}  // namespace bonfire
