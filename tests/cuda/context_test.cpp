// Law 1 for ranks that share samples, and for documents, over NCCL: the ranks share the GPUs there are.
#include <gtest/gtest.h>

#include <optional>
#include <vector>

#include <ATen/ATen.h>
#include <fmt/format.h>

#include "bonfire/comm/data_groups.h"
#include "bonfire/comm/device.h"
#include "bonfire/models/model.h"
#include "bonfire/optim/optimizer.h"
#include "bonfire/shard/engine.h"
#include "tests/support/gpu_ranks.h"
#include "tests/train/step_collectives.h"

namespace bonfire::context_test {
namespace {

using testing::run_gpu_ranks;

constexpr std::int64_t sequence = 64, samples = 2;

struct Training {
  plan::ModelSpec spec;
  ContextWay way = ContextWay::ring;
  bool separate = false;
  at::ScalarType dtype = at::kDouble;
  std::optional<at::ScalarType> compute{};
};

// Losses and norms of some steps on the whole batch; all ranks of `world` share its samples.
std::vector<double> losses(const World& world, const Training& training) {
  const Mesh mesh = world.mesh({.context = world.size()});
  auto model = build_model(training.spec, {.seed = 3,
                                           .dtype = training.dtype,
                                           .device = world.device(),
                                           .context = {.group = mesh.group(Axis::context), .way = training.way}});
  Engine engine = shard(mesh, *model, {.precision = {.parameters = training.compute}, .start = Start::check});
  Sgd optimizer(engine, {.lr = 0.3, .momentum = 0.9});
  const Group all = DataGroups(mesh).all;
  at::Tensor starts = at::zeros({samples, sequence}, at::kLong);
  starts.narrow(1, 5, 30).fill_(5);
  starts.narrow(1, 35, sequence - 35).fill_(35);
  std::vector<double> seen;
  for (int step = 0; step < 4; ++step) {
    const auto tokens = at::arange(samples * (sequence + 1)).mul(7 + 2 * step).remainder(training.spec.vocab);
    const auto batch = tokens.view({samples, sequence + 1}).to(world.device());
    model->set_documents(training.separate ? starts : at::Tensor());
    const auto loss = model->loss(batch.narrow(1, 0, sequence), batch.narrow(1, 1, sequence));
    engine.backward(loss);
    seen.push_back(all.sum(loss.item<double>()) / all.size());
    seen.push_back(optimizer.step({.clip = 0.05}).gradient_norm);
  }
  return seen;
}

std::vector<plan::ModelSpec> specs() {
  const plan::ModelSpec gpt2{
      .type = plan::ModelType::gpt2, .dim = 64, .layers = 2, .heads = 4, .ffn = 96, .vocab = 33, .positions = sequence};
  plan::ModelSpec llama = gpt2;
  llama.type = plan::ModelType::llama;
  llama.heads = 8;
  llama.kv_heads = 4;
  llama.head_dim = 16;
  return {gpt2, llama};
}

class GpuSharedSamples : public ::testing::TestWithParam<int> {};

TEST_P(GpuSharedSamples, TrainAsOnOneRank) {
  BONFIRE_SKIP_WITHOUT_GPU();
  make_deterministic();
  run_gpu_ranks(GetParam(), [](World& world) {
    for (const auto& spec : specs())
      for (const auto way : {ContextWay::ring, ContextWay::heads})
        for (const bool separate : {false, true}) {
          Training training{.spec = spec, .way = way, .separate = separate};
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

TEST_P(GpuSharedSamples, HaveExactlyTheCollectivesOfThePlan) {
  BONFIRE_SKIP_WITHOUT_GPU();
  run_gpu_ranks(GetParam(), [](World& world) {
    for (const char* model : {"llama", "gpt2"})
      for (const char* way : {"ring", "heads"})
        for (const char* more : {"layout.recompute=none", "layout.recompute=full", "layout.tensor=2"}) {
          const int tensor = std::string(more) == "layout.tensor=2" ? 2 : 1;
          if (tensor == world.size()) continue;
          Config config = parse_config(
              fmt::format("[model]\ntype = \"{}\"\ndim = 64\nlayers = 2\nheads = 4\nffn = 96\nvocab = 33\n[data]\n"
                          "sequence = 64\n[train]\nsteps = 4\nbatch = 4\nmicrobatch = 2\nprecision = \"bf16\"\n[layout]\n"
                          "context = {}\ncontext_attention = \"{}\"\n",
                          model, world.size() / tensor, way),
              "a.toml", {more});
          resolve(config, world.size());
          EXPECT_EQ(testing::recorded_collectives(world, config), testing::planned_collectives(config, world.rank()))
              << model << " " << way << " " << more;
        }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, GpuSharedSamples, ::testing::Values(2, 4),
                         [](const auto& info) { return "ranks" + std::to_string(info.param); });

}  // namespace
}  // namespace bonfire::context_test
