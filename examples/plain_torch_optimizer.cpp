// The same as data_parallel.cpp with a torch::optim optimizer: after engine.backward() every gradient is the average over
// the ranks, so any code that reads gradients works.
#include <cstdio>

#include <torch/optim/adamw.h>

#include "examples/teacher.h"

int main(int argc, char** argv) {
  return bonfire::launch(argc, argv, [](bonfire::World& world) {
    constexpr std::int64_t steps = 151, batch = 64;
    const std::int64_t mine = batch / world.size();

    auto model = example::Mlp(1);
    model->to(world.device());
    auto engine = bonfire::shard(world.mesh({.replicate = world.size()}), model);
    torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-2).weight_decay(0));
    for (std::int64_t step = 0; step < steps; ++step) {
      auto [x, y] = example::samples(step * batch + world.rank() * mine, mine, world.device());
      auto loss = (model->forward(x) - y).pow(2).mean();
      optimizer.zero_grad();
      engine.backward(loss);
      optimizer.step();

      const double mean = world.group().sum(loss.item<double>()) / world.size();
      if (world.rank() == 0 && step % 75 == 0) std::printf("step %lld  loss %.9f\n", static_cast<long long>(step), mean);
    }
  });
}
