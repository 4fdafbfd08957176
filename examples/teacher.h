#pragma once

#include <cmath>
#include <cstdint>

#include <bonfire/bonfire.h>

#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>

// What the examples learn: a function of eight numbers, from samples that are made as they are needed.
namespace example {

struct MlpImpl : torch::nn::Module {
  explicit MlpImpl(std::uint64_t seed) {
    hidden = register_module("hidden", torch::nn::Linear(8, 64));
    output = register_module("output", torch::nn::Linear(64, 1));
    // Weights from a counter-based generator: the same on every rank, in whatever order they are made.
    const at::NoGradGuard no_grad;
    for (auto& item : named_parameters()) {
      const bonfire::Random random = bonfire::Random(seed).fork(item.key());
      at::Tensor values = at::empty(item.value().sizes());
      for (std::int64_t at = 0; at < values.numel(); ++at)
        values.data_ptr<float>()[at] = 0.3f * static_cast<float>(random.normal(at));
      item.value().copy_(values);
    }
  }

  at::Tensor forward(const at::Tensor& x) { return output->forward(hidden->forward(x).tanh()); }

  torch::nn::Linear hidden{nullptr}, output{nullptr};
};
TORCH_MODULE(Mlp);

struct Batch {
  at::Tensor x, y;
};

// Samples `first` and the `count - 1` after it. A sample depends on its number alone, so ranks need only agree on who takes
// which.
inline Batch samples(std::int64_t first, std::int64_t count) {
  const bonfire::Random random(7);
  Batch batch{at::empty({count, 8}), at::empty({count, 1})};
  for (std::int64_t row = 0; row < count; ++row) {
    double sum = 0;
    for (std::int64_t at = 0; at < 8; ++at) {
      const double value = random.normal(static_cast<std::uint64_t>((first + row) * 8 + at));
      batch.x[row][at] = value;
      sum += (at + 1) * value;
    }
    batch.y[row][0] = std::sin(sum / 16);
  }
  return batch;
}

}  // namespace example
