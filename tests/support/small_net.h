#pragma once

#include <cmath>
#include <vector>

#include <ATen/ATen.h>
#include <torch/nn/modules/linear.h>

#include "bonfire/comm/mesh.h"
#include "bonfire/nn/unit.h"
#include "bonfire/plan/sharding.h"

// A small model of two Units whose sizes divide nothing, and batches for it: the same on every rank and in every run.
namespace bonfire::testing {

struct LayerImpl : torch::nn::Module {
  LayerImpl(std::int64_t in, std::int64_t out)
      : linear(register_module("linear", torch::nn::Linear(in, out))), gain(register_parameter("gain", at::ones({out}))) {}
  at::Tensor forward(const at::Tensor& x) { return linear->forward(x).tanh() * gain; }

  torch::nn::Linear linear;
  at::Tensor gain;
};
BONFIRE_UNIT(Layer);

struct SmallNetImpl : torch::nn::Module {
  explicit SmallNetImpl(at::ScalarType type = at::kDouble, std::int64_t wide = 13)
      : first(register_module("first", Layer(5, wide))),
        second(register_module("second", Layer(wide, 11))),
        head(register_module("head", torch::nn::Linear(11, 3))) {
    to(type);
    const at::NoGradGuard no_grad;
    double shift = 0;
    for (auto& parameter : parameters()) {
      const auto numbers = at::arange(parameter.numel(), at::kDouble).add(shift += 1).mul(1.7).sin();
      const auto inputs = static_cast<double>(parameter.numel() / parameter.size(0));
      parameter.copy_(numbers.div(std::sqrt(inputs)).view(parameter.sizes()));
    }
  }
  at::Tensor forward(const at::Tensor& x) { return head->forward(second->forward(first->forward(x))); }

  Layer first, second;
  torch::nn::Linear head;
};
BONFIRE_UNIT(SmallNet);

inline constexpr std::int64_t small_batch = 8;

// The mean over samples [begin, begin + count) of a step's batch.
inline at::Tensor small_loss(SmallNet& net, int step, std::int64_t begin = 0, std::int64_t count = small_batch) {
  const auto& like = net->head->weight;
  const auto x = at::arange(small_batch * 5, at::kDouble).add(step * 10).sin().view({small_batch, 5}).to(like.options());
  return net->forward(x.narrow(0, begin, count)).sub(1).pow(2).sum(1).mean();
}

struct Division {
  int shard = 1;
  plan::Sharded what = plan::Sharded::none;
};

// Every way to divide the state of four ranks.
inline const std::vector<Division>& divisions() {
  using plan::Sharded;
  static const std::vector<Division> all{{1, Sharded::none},      {1, Sharded::parameters}, {2, Sharded::optimizer},
                                         {2, Sharded::gradients}, {2, Sharded::parameters}, {4, Sharded::optimizer},
                                         {4, Sharded::gradients}, {4, Sharded::parameters}};
  return all;
}

}  // namespace bonfire::testing
