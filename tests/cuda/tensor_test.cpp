// Law 1 for split layers over NCCL: the ranks share the GPUs there are.
#include <gtest/gtest.h>

#include <optional>
#include <vector>

#include <ATen/ATen.h>
#include <fmt/format.h>

#include "bonfire/comm/device.h"
#include "bonfire/models/model.h"
#include "bonfire/optim/optimizer.h"
#include "bonfire/shard/engine.h"
#include "tests/support/gpu_ranks.h"
#include "tests/support/tiny_training.h"
#include "tests/train/step_collectives.h"

namespace bonfire::tensor_test {
namespace {

using testing::run_gpu_ranks;
using testing::tiny_data;
using testing::tiny_models;
using testing::tiny_samples;

struct Training {
  plan::ModelSpec spec;
  bool sequence = false;
  at::ScalarType dtype = at::kDouble;
  std::optional<at::ScalarType> compute{};
};

// Losses of some steps on the whole batch; layers are split over all ranks of `world`.
std::vector<double> losses(const World& world, const Training& training) {
  const Mesh mesh = world.mesh({.tensor = world.size()});
  const TensorRanks ranks{.group = mesh.group(Axis::tensor), .sequence = training.sequence && world.size() > 1};
  const auto description =
      plan::describe(training.spec, {.rank = world.rank(), .ranks = world.size(), .sequence = ranks.sequence});
  auto model = build_model(description, {.seed = 3, .dtype = training.dtype, .device = world.device(), .tensor = ranks});
  ShardOptions options{.precision = {.parameters = training.compute}, .start = Start::check};
  options.placement = [&](const std::string& name, const at::Tensor&) -> plan::Placement {
    for (const auto& unit : description.units)
      for (const auto& parameter : unit.parameters)
        if (name == (unit.name.empty() ? parameter.name : unit.name + "." + parameter.name) && !parameter.boxes.empty())
          return plan::placement_in(description, parameter);
    return {};
  };
  Engine engine = shard(mesh, *model, options);
  Sgd optimizer(engine, {.lr = 0.3, .momentum = 0.9});
  std::vector<double> all;
  for (int step = 0; step < 4; ++step) {
    const auto [input, target] = tiny_data(training.spec, step, 0, tiny_samples);
    model->set_dropout(static_cast<std::uint64_t>(step), 0);
    const auto loss = model->loss(input.to(world.device()), target.to(world.device()));
    engine.backward(loss);
    all.push_back(loss.item<double>());
    all.push_back(optimizer.step({.clip = 0.05}).gradient_norm);
  }
  return all;
}

// Heads that four ranks divide, some of them with a key for two.
std::vector<plan::ModelSpec> specs() {
  std::vector<plan::ModelSpec> all{tiny_models()[2].spec, tiny_models()[3].spec, tiny_models()[5].spec};
  for (auto& spec : all) {
    spec.heads = 4;
    spec.vocab = 33;
  }
  return all;
}

class GpuSplitLayers : public ::testing::TestWithParam<int> {};

TEST_P(GpuSplitLayers, TrainAsOneRankDoes) {
  BONFIRE_SKIP_WITHOUT_GPU();
  make_deterministic();
  run_gpu_ranks(GetParam(), [](World& world) {
    for (const auto& spec : specs())
      for (const bool sequence : {false, true}) {
        Training training{.spec = spec, .sequence = sequence};
        const auto expected = losses(World(), training), seen = losses(world, training);
        for (std::size_t at = 0; at < expected.size(); ++at)
          EXPECT_NEAR(seen[at], expected[at], 1e-12 * expected[at]) << plan::name_of(spec.type) << ", number " << at;
        training.dtype = at::kFloat;
        training.compute = at::kBFloat16;
        const auto rounded = losses(world, training);
        for (std::size_t at = 0; at < expected.size(); at += 2)
          EXPECT_NEAR(rounded[at], expected[at], 0.02 * expected[at]) << plan::name_of(spec.type) << ", number " << at;
      }
  });
}

TEST_P(GpuSplitLayers, HaveExactlyTheCollectivesOfThePlan) {
  BONFIRE_SKIP_WITHOUT_GPU();
  run_gpu_ranks(GetParam(), [](World& world) {
    for (const char* model : {"llama", "gpt2"})
      for (const char* more : {"layout.sequence_parallel=true", "layout.sequence_parallel=false", "layout.tensor_chunks=3",
                               "layout.recompute=full", "layout.recompute=selective", "layout.shard=2"}) {
        // Half of the ranks split the layers where some of them divide the parameters.
        const int shard = std::string(more) == "layout.shard=2" ? 2 : 1;
        Config config = parse_config(
            fmt::format("[model]\ntype = \"{}\"\ndim = 64\nlayers = 2\nheads = 4\nffn = 96\nvocab = 33\n[data]\nsequence "
                        "= 16\n[train]\nsteps = 4\nbatch = 8\nmicrobatch = 2\nprecision = \"bf16\"\n[layout]\ntensor = {}\n",
                        model, world.size() / shard),
            "a.toml", {more});
        resolve(config, world.size());
        EXPECT_EQ(testing::recorded_collectives(world, config), testing::planned_collectives(config, world.rank()))
            << model << " " << more;
      }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, GpuSplitLayers, ::testing::Values(2, 4),
                         [](const auto& info) { return "ranks" + std::to_string(info.param); });

}  // namespace
}  // namespace bonfire::tensor_test
