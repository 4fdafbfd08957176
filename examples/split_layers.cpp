// A module of your own whose layers several ranks split (tensor parallelism). Run it directly for one rank, or unchanged on
// 2 or 4 with `bonfire launch -n 2 -- split_layers`. The loss is the same for any number of ranks.
#include <cstdio>

#include "examples/teacher.h"

// The hidden layer's width is split: each rank has some rows of `up`, and the columns of `down` that read them.
struct SplitMlpImpl : torch::nn::Module {
  explicit SplitMlpImpl(const bonfire::SplitTable& table) : ranks(table.ranks()) {
    up = make(table, "up", {64, 8}, 8);
    up_bias = make(table, "up_bias", {64}, 8);
    down = make(table, "down", {1, 64}, 64);
    down_bias = make(table, "down_bias", {1}, 64);
  }

  at::Tensor forward(const at::Tensor& x) {
    // Every rank has all of x, computes its part of the hidden layer, and gets the sum of all parts.
    const auto hidden = bonfire::rows_linear(x, {}, up, {.bias = up_bias}, ranks).out.tanh();
    return bonfire::columns_linear(hidden, down, {.linear = {.bias = down_bias}}, ranks);
  }

  at::Tensor up, up_bias, down, down_bias;

 private:
  // All of the parameter from a counter-based generator, of which each rank keeps its part.
  at::Tensor make(const bonfire::SplitTable& table, const std::string& name, const std::vector<std::int64_t>& sizes,
                  double inputs) {
    const bonfire::Random random = bonfire::Random(1).fork(name);
    at::Tensor whole = at::empty(sizes);
    for (std::int64_t at = 0; at < whole.numel(); ++at)
      whole.data_ptr<float>()[at] = static_cast<float>(random.normal(static_cast<std::uint64_t>(at)) / std::sqrt(inputs));
    return register_parameter(name, table.own(name, whole));
  }

  bonfire::TensorRanks ranks;
};
TORCH_MODULE(SplitMlp);

int main(int argc, char** argv) {
  return bonfire::launch(argc, argv, [](bonfire::World& world) {
    constexpr std::int64_t steps = 151, batch = 64;
    const auto mesh = world.mesh({.tensor = world.size()});
    const bonfire::SplitTable table(
        mesh, {{.match = "up*", .split = bonfire::Split::rows}, {.match = "down", .split = bonfire::Split::columns}});

    auto model = SplitMlp(table);
    model->to(world.device());
    auto engine = bonfire::shard(mesh, model, {.placement = table.placement()});
    auto optimizer = bonfire::AdamW(engine, {.lr = 1e-2});
    for (std::int64_t step = 0; step < steps; ++step) {
      auto [x, y] = example::samples(step * batch, batch, world.device());  // the same on every rank
      auto loss = (model->forward(x) - y).pow(2).mean();
      engine.backward(loss);
      optimizer.step();

      if (world.rank() == 0 && step % 75 == 0)
        std::printf("step %lld  loss %.9f\n", static_cast<long long>(step), loss.item<double>());
    }
  });
}
