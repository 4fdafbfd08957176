// Data parallelism in your own program. Run it directly for one rank, or unchanged on several ranks with torchrun, Slurm,
// mpirun or `bonfire launch -n 2 -- data_parallel`. The loss is the same for any number of ranks.
#include <cstdio>

#include "examples/teacher.h"

int main(int argc, char** argv) {
  return bonfire::launch(argc, argv, [](bonfire::World& world) {
    constexpr std::int64_t steps = 151, batch = 64;
    const std::int64_t mine = batch / world.size();

    auto model = example::Mlp(1);
    model->to(world.device());
    auto engine = bonfire::shard(world.mesh({.replicate = world.size()}), model);
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
