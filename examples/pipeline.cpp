// Pipeline parallelism for a model of your own: each rank builds and trains some of its layers. Run it alone, or under
// `bonfire launch -n 4 -- pipeline`: the number of stages changes nothing but the time, and the loss is the same.
#include <cstdio>

#include "examples/teacher.h"

namespace {

constexpr int layers = 4;

// The layers that one stage runs. Their names are those that they have in the whole model.
struct PartImpl : torch::nn::Module {
  explicit PartImpl(bonfire::UnitRange range) : last(range.end == layers) {
    for (int at = range.begin; at < range.end; ++at) {
      const std::string name = "layer" + std::to_string(at);
      parts.push_back(
          register_module(name, example::Layer(bonfire::Random(1).fork(name), at == 0 ? 8 : 32, at + 1 == layers ? 1 : 32)));
    }
  }

  at::Tensor forward(at::Tensor x) {
    for (std::size_t at = 0; at < parts.size(); ++at) {
      x = parts[at]->forward(x);
      if (!last || at + 1 < parts.size()) x = x.tanh();
    }
    return x;
  }

  bool last;
  std::vector<example::Layer> parts;
};
TORCH_MODULE(Part);

}  // namespace

int main(int argc, char** argv) {
  return bonfire::launch(argc, argv, [](bonfire::World& world) {
    constexpr std::int64_t steps = 151, microbatches = 8, samples = 8;

    bonfire::Chain chain{.units = {"layer0", "layer1", "layer2", "layer3"}};
    chain.build = [&](bonfire::UnitRange range) {
      Part part(range);
      part->to(world.device());
      return bonfire::StageModule{part.ptr(), [part](bonfire::Tensors values, const bonfire::Microbatch& batch) mutable {
                                    const auto out = part->forward(values[0]);
                                    // The last stage returns the mean loss of the microbatch.
                                    return bonfire::Tensors{part->last ? (out - batch.target[0]).pow(2).mean() : out};
                                  }};
    };
    const auto schedule = bonfire::schedule::generate("1f1b", {.ranks = world.size(), .microbatches = microbatches});
    bonfire::Pipeline pipeline(world.mesh({.pipeline = world.size()}), chain, {.schedule = schedule});
    bonfire::AdamW optimizer(pipeline, {.lr = 1e-2});
    for (std::int64_t step = 0; step < steps; ++step) {
      // All stages get the same microbatches: the first reads the inputs, the last the targets.
      std::vector<bonfire::Microbatch> batch;
      for (std::int64_t at = 0; at < microbatches; ++at) {
        const auto [x, y] = example::samples((step * microbatches + at) * samples, samples, world.device());
        batch.push_back({.input = {x}, .target = {y}});
      }
      const auto report = pipeline.step(batch);
      optimizer.step({.clip = 1});
      if (world.rank() == 0 && step % 75 == 0)
        std::printf("step %lld  loss %.9f\n", static_cast<long long>(step), report.loss);
    }
  });
}
