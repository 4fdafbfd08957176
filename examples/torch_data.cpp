// torch's data loaders feed a data-parallel run: a dataset of your own, loaded by a thread in the background, and a sampler
// that gives each rank its part of every batch, so that the loss does not depend on the number of ranks.
#include <cstdio>
#include <optional>
#include <vector>

#include <torch/data.h>

#include "examples/teacher.h"

namespace {

constexpr std::int64_t steps = 151, batch = 64;

struct Dataset : torch::data::datasets::Dataset<Dataset> {
  torch::data::Example<> get(std::size_t index) override {
    const auto [x, y] = example::samples(static_cast<std::int64_t>(index), 1, c10::kCPU);
    return {x[0], y[0]};
  }
  std::optional<std::size_t> size() const override { return steps * batch; }
};

// Of every batch of all ranks, those of one.
struct RankSampler : torch::data::samplers::Sampler<> {
  explicit RankSampler(const bonfire::World& world) : rank(world.rank()), ranks(world.size()) {}

  void reset(std::optional<std::size_t> = std::nullopt) override { next_batch = 0; }
  std::optional<std::vector<std::size_t>> next(std::size_t count) override {
    if (next_batch == steps) return std::nullopt;
    const auto all = count * static_cast<std::size_t>(ranks);
    std::vector<std::size_t> indices(count);
    for (std::size_t at = 0; at < count; ++at)
      indices[at] = static_cast<std::size_t>(next_batch) * all + static_cast<std::size_t>(rank) * count + at;
    ++next_batch;
    return indices;
  }
  void save(torch::serialize::OutputArchive&) const override {}
  void load(torch::serialize::InputArchive&) override {}

  int rank, ranks;
  std::int64_t next_batch = 0;
};

}  // namespace

int main(int argc, char** argv) {
  return bonfire::launch(argc, argv, [](bonfire::World& world) {
    auto model = example::Mlp(1);
    model->to(world.device());
    auto engine = bonfire::shard(world.mesh({.replicate = world.size()}), model);
    auto optimizer = bonfire::AdamW(engine, {.lr = 1e-2});
    auto loader = torch::data::make_data_loader(
        Dataset().map(torch::data::transforms::Stack<>()), RankSampler(world),
        torch::data::DataLoaderOptions(static_cast<std::size_t>(batch / world.size())).workers(1));
    std::int64_t step = 0;
    for (auto& samples : *loader) {
      auto loss = (model->forward(samples.data.to(world.device())) - samples.target.to(world.device())).pow(2).mean();
      engine.backward(loss);
      optimizer.step();

      const double mean = world.group().sum(loss.item<double>()) / world.size();
      if (world.rank() == 0 && step % 75 == 0) std::printf("step %lld  loss %.9f\n", static_cast<long long>(step), mean);
      ++step;
    }
  });
}
