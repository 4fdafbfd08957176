#pragma once

#include <torch/nn/modules/linear.h>

#include "tests/shard/twins.h"

namespace bonfire::testing {

// A plain module, unmarked: nothing in it knows of Bonfire. `extra` is used only when asked for, `frozen` never learns, and
// `first` is used twice.
struct Plain : torch::nn::Module {
  explicit Plain(at::ScalarType dtype = at::kDouble) {
    first = register_module("first", torch::nn::Linear(6, 6));
    frozen = register_module("frozen", torch::nn::Linear(6, 6));
    extra = register_module("extra", torch::nn::Linear(6, 6));
    last = register_module("last", torch::nn::Linear(6, 2));
    to(dtype);
    const at::NoGradGuard no_grad;
    std::uint64_t seed = 100;
    for (auto& parameter : parameters()) parameter.copy_(numbers(parameter.sizes(), ++seed).mul(0.3));
    for (auto& parameter : frozen->parameters()) parameter.set_requires_grad(false);
  }

  at::Tensor forward(const at::Tensor& x, bool use_extra = true) {
    auto y = first->forward(first->forward(x).tanh()).tanh();
    y = frozen->forward(y);
    if (use_extra) y = y + extra->forward(y).tanh();
    return last->forward(y);
  }

  torch::nn::Linear first{nullptr}, frozen{nullptr}, extra{nullptr}, last{nullptr};
};

inline double distance(const at::Tensor& a, const at::Tensor& b) { return ((a - b).norm() / b.norm()).item<double>(); }

}  // namespace bonfire::testing
