// Recomputation on a GPU: its streams, its generator, and what its kernels save.
#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>

#include "bonfire/comm/device.h"
#include "bonfire/models/model.h"
#include "bonfire/nn/host_inputs.h"
#include "bonfire/nn/recompute.h"
#include "bonfire/plan/activations.h"
#include "tests/support/gpu_ranks.h"

namespace bonfire::recompute_test {
namespace {

using at::Tensor;
using plan::Recompute;

const c10::Device gpu(c10::kCUDA, 0);

std::vector<Tensor> outcome_of(const plan::ModelSpec& spec, Recompute what, at::ScalarType type) {
  auto description = plan::describe(spec);
  plan::recompute(description, what);
  const auto model = build_model(std::move(description), {.seed = 3, .dtype = type, .device = gpu});
  const auto tokens = at::arange(4 * 65, at::TensorOptions(at::kLong).device(gpu)).mul(7).remainder(61).view({4, 65});
  model->set_dropout(5, 0);
  const Tensor loss = model->loss(tokens.narrow(1, 0, 64).contiguous(), tokens.narrow(1, 1, 64).contiguous());
  model->set_dropout(5, 4);
  loss.backward();
  std::vector<Tensor> all{loss.detach()};
  for (const auto& parameter : model->parameters()) all.push_back(parameter.grad());
  return all;
}

// Some backwards add in an order that varies.
TEST(GpuRecompute, HasTheGradientsOfOthers) {
  BONFIRE_SKIP_WITHOUT_GPU();
  plan::ModelSpec spec{.type = plan::ModelType::llama,
                       .dim = 128,
                       .layers = 3,
                       .heads = 4,
                       .kv_heads = 2,
                       .ffn = 256,
                       .vocab = 64,
                       .positions = 64};
  for (const auto type : {plan::ModelType::llama, plan::ModelType::gpt2}) {
    spec.type = type;
    if (type == plan::ModelType::gpt2) spec.kv_heads = 0, spec.dropout = 0.2;
    for (const auto dtype : {at::kFloat, at::kBFloat16}) {
      const auto expected = outcome_of(spec, Recompute::none, dtype);
      for (const auto what : {Recompute::selective, Recompute::full}) {
        const auto made = outcome_of(spec, what, dtype);
        EXPECT_TRUE(at::equal(made[0], expected[0]));
        for (std::size_t at = 1; at < made.size(); ++at) {
          const double away = (made[at] - expected[at]).to(at::kDouble).norm().item<double>();
          EXPECT_LE(away, (dtype == at::kFloat ? 1e-5 : 2e-2) * expected[at].to(at::kDouble).norm().item<double>() + 1e-12)
              << plan::name_of(type) << " " << at;
        }
      }
    }
  }
}

TEST(GpuRecompute, InputsComeBackFromTheHost) {
  BONFIRE_SKIP_WITHOUT_GPU();
  const plan::ModelSpec spec{.dim = 128, .layers = 6, .heads = 4, .ffn = 256, .vocab = 64, .positions = 64};
  auto description = plan::describe(spec);
  plan::recompute(description, Recompute::full);
  const auto tokens = at::arange(4 * 64, at::TensorOptions(at::kLong).device(gpu)).remainder(61).view({4, 64});
  std::vector<Tensor> gradients[2];
  for (const bool moves : {false, true}) {
    const auto host = moves ? std::make_shared<HostInputs>() : nullptr;
    const auto model = build_model(description, {.seed = 3, .device = gpu, .host_inputs = host});
    for (int step = 0; step < 3; ++step) model->loss(tokens, tokens).backward();
    for (const auto& parameter : model->parameters()) gradients[moves].push_back(parameter.grad());
    if (!moves) continue;
    EXPECT_EQ(host->bytes_kept(), 0);
    EXPECT_EQ(host->bytes_moved(), 3 * 2 * 6 * 4 * 64 * 128 * 4);
  }
  for (std::size_t at = 0; at < gradients[0].size(); ++at)
    EXPECT_LE((gradients[0][at] - gradients[1][at]).norm().item<float>(),
              1e-5F * gradients[0][at].norm().item<float>() + 1e-12F);
}

// One that is on its way back when nobody wants it any more, as when backward ends with an error.
TEST(GpuRecompute, MemoryOfAnInputThatWasNotTakenIsUsedAfterItsCopy) {
  BONFIRE_SKIP_WITHOUT_GPU();
  const auto host = std::make_shared<HostInputs>();
  const at::TensorOptions on_gpu(gpu);
  constexpr std::int64_t elements = std::int64_t{64} << 20;  // its copy takes some milliseconds, filling it less than one
  auto first = host->keep(at::full({elements}, 2, on_gpu)), second = host->keep(at::full({1}, 3, on_gpu));
  synchronize(gpu);
  EXPECT_EQ(second->take().item<float>(), 3);  // and the first is on its way
  first.reset();
  const Tensor others = at::empty({elements}, on_gpu).fill_(1);
  synchronize(gpu);
  EXPECT_EQ(others.max().item<float>(), 1);
}

TEST(GpuRecompute, RepeatsTheDevicesRandomNumbers) {
  BONFIRE_SKIP_WITHOUT_GPU();
  torch::nn::Sequential net(torch::nn::Linear(64, 64), torch::nn::Dropout(0.5));
  net->to(gpu);
  const auto run = [&](bool again) {
    at::manual_seed(7);
    const Tensor x = at::ones({32, 64}, at::TensorOptions(gpu)).requires_grad_();
    const Tensor y = again ? recompute([net](Tensor in) mutable { return net->forward(in); }, x) : net->forward(x);
    const Tensor between = at::rand({8}, at::TensorOptions(gpu));
    y.square().sum().backward();
    return std::vector<Tensor>{y.detach(), between, x.grad(), at::rand({8}, at::TensorOptions(gpu))};
  };
  const auto expected = run(false), made = run(true);
  for (std::size_t at = 0; at < made.size(); ++at) EXPECT_TRUE(at::allclose(made[at], expected[at])) << at;
}

}  // namespace
}  // namespace bonfire::recompute_test
