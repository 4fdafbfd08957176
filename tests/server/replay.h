#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include "bonfire/server/server.h"
#include "bonfire/shard/slices.h"

namespace torch::nn {
class Module;
}

// What servers should have come to, found again in one process from the order of their updates alone: plain torch, and a cut
// of the weights that is written down here once more.
namespace bonfire::testing {

struct Replay {
  // Plain modules; their parameters in the order of registration are those of `units`, one list after the other.
  std::function<std::shared_ptr<torch::nn::Module>()> make;
  // Parameters of each Unit, by their number in the module, in forward order.
  std::vector<std::vector<std::size_t>> units;
  // Backward of a worker's step through the module.
  std::function<void(torch::nn::Module& module, int worker, std::int64_t step)> backward;
  std::function<std::unique_ptr<torch::optim::Optimizer>(const std::vector<at::Tensor>&)> optimizer;

  // The weights at the end. `updates`: of each server.
  std::vector<at::Tensor> run(const std::vector<std::vector<ServerUpdate>>& updates) const;
};

// Writes the values of slices into whole tensors, by name.
void put_slices(const std::vector<Slice>& slices, torch::nn::Module& module);

}  // namespace bonfire::testing
