// The same as data_parallel.cpp, with parameters, gradients and optimizer state sharded over all ranks: one line of code
// differs. The loss is the same; each of N ranks holds 1/N of the model state.
#include <cstdio>

#include "examples/teacher.h"

int main(int argc, char** argv) {
  return bonfire::launch(argc, argv, [](bonfire::World& world) {
    constexpr std::int64_t steps = 151, batch = 64;
    const std::int64_t mine = batch / world.size();

    auto model = example::Mlp(1);
    model->to(world.device());
    auto engine = bonfire::shard(world.mesh({.shard = world.size()}), model, {.what = bonfire::Sharded::parameters});
    auto optimizer = bonfire::AdamW(engine, {.lr = 1e-2});
    for (std::int64_t step = 0; step < steps; ++step) {
      auto [x, y] = example::samples(step * batch + world.rank() * mine, mine, world.device());
      auto loss = (model->forward(x) - y).pow(2).mean();
      engine.backward(loss);
      optimizer.step();

      const double mean = world.group().sum(loss.item<double>()) / world.size();
      if (world.rank() == 0 && step % 75 == 0) std::printf("step %lld  loss %.9f\n", static_cast<long long>(step), mean);
    }
  });
}
