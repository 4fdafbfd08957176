// A program of somebody else: a model of their own, trained on the ranks it is started on.
#include <bonfire/bonfire.h>

#include <cstdio>

#include <torch/nn/modules/linear.h>

struct ModelImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x, const at::Tensor& y) { return (layer->forward(x) - y).pow(2).mean(); }

  torch::nn::Linear layer = register_module("layer", torch::nn::Linear(4, 1));
};
TORCH_MODULE(Model);

int main(int argc, char** argv) {
  return bonfire::launch(argc, argv, [](bonfire::World& world) {
    auto model = Model();
    auto engine = bonfire::shard(world.mesh({.replicate = world.size()}), model, {.start = bonfire::Start::broadcast});
    auto optimizer = bonfire::AdamW(engine, {.lr = 0.1});
    double first = 0, last = 0;
    for (int step = 0; step < 50; ++step) {
      auto x = at::arange(32.0).view({8, 4}).add(world.rank() + step).sin();
      auto loss = model->forward(x, x.sum(1, true));
      engine.backward(loss);
      optimizer.step();
      last = world.group().sum(loss.item<double>()) / world.size();
      if (step == 0) first = last;
    }
    if (world.rank() == 0)
      std::printf("bonfire %s on LibTorch %s: %d ranks, %s\n", BONFIRE_VERSION, BONFIRE_TORCH_VERSION, world.size(),
                  last < 0.1 * first ? "learned" : "did not learn");
  });
}
