// A model that is too large for one rank: inside a `Build` scope each Unit is sharded before its constructor returns, so a
// rank never holds more than its shards and the Unit under construction. While it trains, each Unit keeps only its input for
// backward, where it runs again.
#include <cstdio>
#include <optional>

#include "examples/teacher.h"

int main(int argc, char** argv) {
  return bonfire::launch(argc, argv, [](bonfire::World& world) {
    constexpr std::int64_t steps = 151, batch = 64;
    const std::int64_t mine = batch / world.size();
    const auto mesh = world.mesh({.shard = world.size()});
    const bonfire::ShardOptions options{.what = bonfire::Sharded::parameters};

    std::optional<bonfire::Build> building(std::in_place, mesh, options);
    auto model = example::Mlp(/*seed=*/1, /*width=*/128, /*depth=*/6);
    building.reset();
    auto engine = bonfire::shard(mesh, model, options);
    const bonfire::RecomputedUnits recomputed(model);
    auto optimizer = bonfire::AdamW(engine, {.lr = 1e-3});
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
