// Partial fine-tuning, fully sharded: at first only the last layer is trained; then the rest is unfrozen and trained with a
// tenth of the learning rate and without weight decay. Frozen parameters have no gradients and no optimizer state, and are
// not reduced.
#include <cstdio>

#include "examples/teacher.h"

int main(int argc, char** argv) {
  return bonfire::launch(argc, argv, [](bonfire::World& world) {
    constexpr std::int64_t steps = 151, thaw = 76, batch = 64;
    const std::int64_t mine = batch / world.size();

    auto model = example::Mlp(1);
    model->to(world.device());
    const auto train_hidden = [&](bool on) {
      for (auto& layer : model->hidden)
        for (auto& parameter : layer->parameters()) parameter.set_requires_grad(on);
    };
    train_hidden(false);
    auto engine = bonfire::shard(world.mesh({.shard = world.size()}), model, {.what = bonfire::Sharded::parameters});
    const bonfire::ParameterRule gently{
        .matches = [](const std::string& name, const at::Tensor&) { return name.starts_with("hidden"); },
        .lr_factor = 0.1,
        .weight_decay = 0};
    auto optimizer = bonfire::AdamW(engine, {.lr = 1e-2, .weight_decay = 1e-3, .rules = {gently}});
    for (std::int64_t step = 0; step < steps; ++step) {
      if (step == thaw) train_hidden(true);
      auto [x, y] = example::samples(step * batch + world.rank() * mine, mine, world.device());
      auto loss = (model->forward(x) - y).pow(2).mean();
      engine.backward(loss);
      optimizer.step();

      const double mean = world.group().sum(loss.item<double>()) / world.size();
      const double state = world.group().sum(static_cast<double>(optimizer.state_bytes()));
      if (world.rank() == 0 && step % 75 == 0)
        std::printf("step %lld  loss %.9f  optimizer state of all ranks: %.0f bytes\n", static_cast<long long>(step), mean,
                    state);
    }
  });
}
