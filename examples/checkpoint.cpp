// A program that can be stopped at any time, even killed, and continues where it last saved, on any number of ranks:
// checkpoint FOLDER STEPS, alone or under `bonfire launch -n 2 -- checkpoint FOLDER STEPS`.
#include <cstdio>
#include <cstdlib>

#include "examples/teacher.h"

int main(int argc, char** argv) {
  if (argc < 3) return std::fprintf(stderr, "usage: checkpoint FOLDER STEPS\n"), 2;
  return bonfire::launch(argc, argv, [&](bonfire::World& world) {
    const std::int64_t steps = std::atoll(argv[2]), batch = 64, mine = batch / world.size();

    auto model = example::Mlp(1);
    model->to(world.device());
    auto engine = bonfire::shard(world.mesh({.shard = world.size()}), model, {.what = bonfire::Sharded::parameters});
    auto optimizer = bonfire::AdamW(engine, {.lr = 1e-2});

    bonfire::Checkpoints checkpoints(world, argv[1]);
    const bonfire::CheckpointContents contents{.tensors = {&engine, &optimizer}};
    const std::int64_t done = checkpoints.load_latest(contents).value_or(0);
    for (std::int64_t step = done + 1; step <= steps; ++step) {
      auto [x, y] = example::samples(step * batch + world.rank() * mine, mine, world.device());
      auto loss = (model->forward(x) - y).pow(2).mean();
      engine.backward(loss);
      optimizer.step();
      if (step % 50 == 0) checkpoints.save(step, contents);

      const double mean = world.group().sum(loss.item<double>()) / world.size();
      if (world.rank() == 0 && step > steps - 3) std::printf("step %lld  loss %.9f\n", static_cast<long long>(step), mean);
    }
    checkpoints.finish();
  });
}
