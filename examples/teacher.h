#pragma once

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include <bonfire/bonfire.h>

#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>

// The task of the examples: learning a function of eight numbers, from samples generated on demand.
namespace example {

// A layer is the sharding unit, like an FSDP-wrapped module. If parameters are not sharded, TORCH_MODULE works too.
struct LayerImpl : torch::nn::LinearImpl {
  LayerImpl(const bonfire::Random& random, std::int64_t inputs, std::int64_t outputs) : LinearImpl(inputs, outputs) {
    // Weights from a counter-based generator: the same in every run, so that runs can be compared. Torch's own
    // initialisation works too; all ranks start from rank 0's weights.
    const at::NoGradGuard no_grad;
    for (auto& item : named_parameters()) {
      const bonfire::Random own = random.fork(item.key());
      at::Tensor values = at::empty(item.value().sizes());
      for (std::int64_t at = 0; at < values.numel(); ++at)
        values.data_ptr<float>()[at] = static_cast<float>(own.normal(at) / std::sqrt(static_cast<double>(inputs)));
      item.value().copy_(values);
    }
  }

  at::Tensor forward(const at::Tensor& x) { return LinearImpl::forward(x); }
};
BONFIRE_UNIT(Layer);

// `depth` hidden layers of `width`. The root is a Unit too.
struct MlpImpl : torch::nn::Module {
  explicit MlpImpl(std::uint64_t seed, std::int64_t width = 64, int depth = 1) {
    const bonfire::Random random(seed);
    for (int at = 0; at < depth; ++at) {
      const std::string name = "hidden" + std::to_string(at);
      hidden.push_back(register_module(name, Layer(random.fork(name), at == 0 ? 8 : width, width)));
    }
    output = register_module("output", Layer(random.fork("output"), width, 1));
  }

  at::Tensor forward(at::Tensor x) {
    for (auto& layer : hidden) x = layer->forward(x).tanh();
    return output->forward(x);
  }

  std::vector<Layer> hidden;
  Layer output{nullptr};
};
BONFIRE_UNIT(Mlp);

struct Batch {
  at::Tensor x, y;
};

// Samples `first` and the `count - 1` after it, on `device`. A sample depends only on its number, so ranks need to
// agree only on who takes which.
inline Batch samples(std::int64_t first, std::int64_t count, c10::Device device) {
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
  return {batch.x.to(device), batch.y.to(device)};
}

}  // namespace example
