#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "bonfire/comm/device.h"
#include "bonfire/models/model.h"
#include "bonfire/optim/grad_scaler.h"
#include "bonfire/optim/optimizer.h"
#include "bonfire/shard/engine.h"
#include "tests/support/gpu_ranks.h"

namespace bonfire {
namespace {

using plan::ModelSpec;
using plan::ModelType;

constexpr std::int64_t samples = 8, sequence = 12;
constexpr int steps = 4;

ModelSpec spec_of(const std::string& name) {
  if (name == "vgg")
    return {.type = ModelType::vgg, .ffn = 12, .classes = 5, .image = 8, .pool = 2, .convolutions = {4, 0, 6, 6, 0}};
  ModelSpec spec{.dim = 24, .layers = 2, .heads = 4, .ffn = 20, .vocab = 31, .positions = 16};
  spec.type = plan::model_type(name);
  spec.tied = name == "gpt2";
  return spec;
}

struct Training {
  std::string model = "llama";
  bool adam = true;
  at::ScalarType dtype = at::kDouble;
  std::optional<at::ScalarType> compute{};
  int accumulation = 1;
};

struct Result {
  at::Tensor weights;  // all of them, in fp64 on the CPU
  std::vector<double> losses;
};

// Trains on the samples of this rank. Whatever the world, the samples of a step are the same ones.
Result train(const World& world, const Training& run) {
  const ModelSpec spec = spec_of(run.model);
  const auto model = build_model(spec, {.seed = 5, .dtype = run.dtype, .device = world.device()});
  Engine engine = shard(world.mesh({.replicate = world.size()}), *model,
                        {.compute = run.compute, .buckets = {.bucket_bytes = 2000, .first_bucket_bytes = 300}});
  std::unique_ptr<Optimizer> optimizer;
  if (run.adam)
    optimizer = std::make_unique<AdamW>(engine, AdamOptions{.lr = 0.01, .weight_decay = 0.1});
  else
    optimizer = std::make_unique<Sgd>(engine, SgdOptions{.lr = 0.1, .momentum = 0.9});
  GradScaler scaler({.scale = 1024});
  const bool scaled = run.compute == at::kHalf;

  Result result;
  const auto type = run.compute.value_or(run.dtype);
  const std::int64_t mine = samples / world.size(), part = mine / run.accumulation;
  for (int step = 0; step < steps; ++step) {
    at::Tensor input, target;
    if (spec.type == ModelType::vgg) {
      input = at::arange(samples * 3 * 64, at::kDouble).add(step).mul(0.37).sin().view({samples, 3, 8, 8}).to(type);
      target = (at::arange(samples) + step) % spec.classes;
    } else {
      input = (at::arange(samples * sequence).mul(7) + step).remainder(spec.vocab).view({samples, sequence});
      target = (at::arange(samples * sequence).mul(5) + step).remainder(spec.vocab).view({samples, sequence});
    }
    double sum = 0;
    for (int micro = 0; micro < run.accumulation; ++micro) {
      const std::int64_t begin = world.rank() * mine + micro * part;
      const auto loss =
          model->forward(input.narrow(0, begin, part).to(world.device()), target.narrow(0, begin, part).to(world.device())) /
          run.accumulation;
      sum += loss.item<double>();
      const auto backward = scaled ? scaler.scale(loss) : loss;
      micro + 1 < run.accumulation ? engine.accumulate(backward) : engine.backward(backward);
    }
    optimizer->step({.clip = 1.0, .scaler = scaled ? &scaler : nullptr});
    result.losses.push_back(world.group().sum(sum) / world.size());
  }
  engine.check_equal();
  std::vector<at::Tensor> flat;
  for (const auto& parameter : model->parameters()) flat.push_back(parameter.detach().cpu().to(at::kDouble).reshape(-1));
  result.weights = at::cat(flat);
  return result;
}

double distance(const at::Tensor& a, const at::Tensor& b) { return ((a - b).norm() / b.norm()).item<double>(); }

class GpuParity : public ::testing::TestWithParam<int> {};

// Law 1, over NCCL: the weights of any number of GPU ranks are those of one CPU rank.
TEST_P(GpuParity, WeightsAreThoseOfOneCpuRank) {
  BONFIRE_SKIP_WITHOUT_GPU();
  testing::run_gpu_ranks(GetParam(), [](World& world) {
    for (const char* model : {"llama", "gpt2", "mlp", "vgg"})
      for (const bool adam : {true, false})
        for (const int accumulation : {1, 2}) {
          SCOPED_TRACE(fmt::format("{}, {}, accumulation {}", model, adam ? "adamw" : "sgd", accumulation));
          const Result alone = train(World(), {.model = model, .adam = adam});
          const Result here = train(world, {.model = model, .adam = adam, .accumulation = accumulation});
          EXPECT_LT(distance(here.weights, alone.weights), 1e-9);
          for (int step = 0; step < steps; ++step) EXPECT_NEAR(here.losses[step], alone.losses[step], 1e-9);
        }
  });
}

TEST_P(GpuParity, TwoRunsGiveEqualBits) {
  BONFIRE_SKIP_WITHOUT_GPU();
  testing::run_gpu_ranks(GetParam(), [](World& world) {
    const Training run{.dtype = at::kFloat};
    EXPECT_TRUE(at::equal(train(world, run).weights, train(world, run).weights));
  });
}

// In 16 bits the curve follows the one in 32 within what they can hold: bf16 has 8 bits of a number, fp16 has 11.
TEST_P(GpuParity, SixteenBitsFollowThirtyTwo) {
  BONFIRE_SKIP_WITHOUT_GPU();
  testing::run_gpu_ranks(GetParam(), [](World& world) {
    const auto full = train(world, {.dtype = at::kFloat}).losses;
    EXPECT_LT(full.back(), full.front());
    for (const auto compute : {at::kBFloat16, at::kHalf}) {
      const auto half = train(world, {.dtype = at::kFloat, .compute = compute}).losses;
      for (int step = 0; step < steps; ++step)
        EXPECT_NEAR(half[step], full[step], 0.02 * full[step]) << c10::toString(compute);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, GpuParity, ::testing::Values(1, 2, 4));

}  // namespace
}  // namespace bonfire
