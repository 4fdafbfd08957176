// Fine-tuning with low-rank adapters, fully sharded: the weights of a checkpoint that the example `checkpoint` has written
// are frozen, and thin matrices beside them learn another task. What is saved are these matrices, and the checksum of the
// weights below them: adapters BASE FOLDER, for example
//
//   checkpoint runs/teacher 300
//   adapters runs/teacher/step-00000300 runs/tuned
#include <cstdio>

#include "examples/teacher.h"

// In place of torch::nn::Linear. Parameters and their names are the same, so checkpoints of the plain model fit.
struct LayerImpl : bonfire::AdaptableLinearImpl {
  using AdaptableLinearImpl::AdaptableLinearImpl;
  at::Tensor forward(const at::Tensor& x) { return AdaptableLinearImpl::forward(x); }
};
BONFIRE_UNIT(Layer);

struct NetImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return output->forward(hidden->forward(x).tanh()); }

  Layer hidden = register_module("hidden0", Layer(8, 64)), output = register_module("output", Layer(64, 1));
};
BONFIRE_UNIT(Net);

int main(int argc, char** argv) {
  if (argc < 3) return std::fprintf(stderr, "usage: adapters BASE FOLDER\n"), 2;
  return bonfire::launch(argc, argv, [&](bonfire::World& world) {
    constexpr std::int64_t steps = 151, batch = 64;
    const std::int64_t mine = batch / world.size();

    auto model = Net();
    bonfire::add_adapters(*model, {.rank = 4, .alpha = 8});  // freezes everything else
    model->to(world.device());
    auto engine = bonfire::shard(world.mesh({.shard = world.size()}), model, {.what = bonfire::Sharded::parameters});
    auto optimizer = bonfire::AdamW(engine, {.lr = 1e-2, .weight_decay = 0});

    const auto is_adapter = [](const std::string& name) { return name.find(".adapter.") != std::string::npos; };
    bonfire::SelectedSlices weights(
        engine, [&](const auto& name, const auto& kind) { return kind == "value" && !is_adapter(name); });
    bonfire::load_checkpoint(world, argv[1], {.tensors = {&weights}},
                             {.wanted = [](const auto&, const auto& kind) { return kind == "value"; }});

    bonfire::SelectedSlices adapters(
        engine, [&](const auto& name, const auto& kind) { return kind == "value" && is_adapter(name); });
    bonfire::BaseWeights base(world, argv[1]);
    bonfire::Checkpoints checkpoints(world, argv[2]);
    const bonfire::CheckpointContents contents{.tensors = {&adapters, &optimizer}, .states = {{bonfire::base_state, &base}}};
    for (std::int64_t step = 0; step < steps; ++step) {
      auto [x, y] = example::samples(step * batch + world.rank() * mine, mine, world.device());
      auto loss = (model->forward(x) - (1 - y)).pow(2).mean();  // the other way round
      engine.backward(loss);
      optimizer.step();

      const double mean = world.group().sum(loss.item<double>()) / world.size();
      if (world.rank() == 0 && step % 75 == 0) std::printf("step %lld  loss %.9f\n", static_cast<long long>(step), mean);
    }
    checkpoints.save_now(steps, contents);
  });
}
