// Optimizer state and masters on the host beside a GPU.
#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include "bonfire/comm/device.h"
#include "bonfire/optim/conveyor.h"
#include "bonfire/optim/optimizer.h"
#include "bonfire/shard/engine.h"
#include "tests/support/gpu_ranks.h"
#include "tests/support/small_net.h"

namespace bonfire::offload_test {
namespace {

using testing::run_gpu_ranks;
using testing::small_batch;
using testing::small_loss;
using testing::SmallNet;

const c10::Device gpu(c10::kCUDA, 0);

// Loads of many sizes, whose input is still being made when they are asked for, in rounds that follow each other without
// waiting: every number arrives, in both directions.
TEST(GpuConveyor, BringsEverythingThereAndBack) {
  BONFIRE_SKIP_WITHOUT_GPU();
  Conveyor conveyor;
  for (const auto out_type : {at::kFloat, at::kBFloat16, at::kHalf}) {
    std::vector<at::Tensor> in, out, home;
    for (int at = 0; at < 9; ++at) {
      const std::int64_t elements = 1 + at * at * 40000;
      in.push_back(at::zeros({elements}, at::TensorOptions(gpu).dtype(at % 2 == 0 ? at::kFloat : at::kBFloat16)));
      out.push_back(at % 4 == 3 ? at::Tensor() : at::zeros({elements}, at::TensorOptions(gpu).dtype(out_type)));
      home.push_back(at::zeros({elements}, at::TensorOptions(at::kFloat).pinned_memory(true)));
    }
    const auto large = at::ones({2048, 2048}, at::TensorOptions(gpu));
    for (int round = 1; round <= 3; ++round) {
      std::vector<Conveyor::Load> loads;
      for (std::size_t at = 0; at < in.size(); ++at) {
        const auto slow = large.mm(large).mm(large).sum().mul(0);  // keeps the stream busy while the host goes on
        in[at].copy_(at::arange(in[at].numel(), at::TensorOptions(gpu)).remainder(100).add(round).add(slow));
        loads.push_back({in[at], out[at], home[at]});
      }
      conveyor.begin(loads);
      for (std::size_t at = 0; at < loads.size(); ++at) {
        const auto piece = conveyor.next();
        ASSERT_TRUE(piece.in.device().is_cpu());
        home[at].copy_(piece.in.to(at::kFloat) * 2);
        ASSERT_EQ(piece.out.defined(), out[at].defined() && out_type != at::kFloat);
        if (piece.out.defined()) piece.out.copy_(home[at]);
        conveyor.send();
        if (at % 3 == 2) conveyor.flush();
      }
      conveyor.end();
      for (std::size_t at = 0; at < in.size(); ++at) {
        const auto expected = at::arange(in[at].numel(), at::kFloat).remainder(100).add(round).mul(2);
        EXPECT_TRUE(home[at].equal(expected)) << at;
        EXPECT_TRUE(!out[at].defined() || out[at].cpu().to(at::kFloat).equal(expected)) << at;
      }
    }
  }
}

struct Trained {
  std::vector<at::Tensor> weights;
  std::int64_t gpu_state = 0, host_state = 0;
};

struct Setting {
  at::ScalarType type = at::kDouble;
  std::optional<at::ScalarType> compute{};
  std::int64_t wide = 13;
  bool adam = true;
};

Trained train(World& world, const Setting& setting, Sharded what, Offload offload) {
  SmallNet net(setting.type, setting.wide);
  net->to(world.device());
  const int ranks = world.size();
  Engine engine =
      shard(world.mesh({.shard = ranks}), net,
            {.what = ranks == 1 ? Sharded::none : what, .precision = {.parameters = setting.compute}, .offload = offload});
  std::unique_ptr<Optimizer> optimizer;
  if (setting.adam)
    optimizer =
        std::make_unique<AdamW>(engine, AdamOptions{.lr = 0.01, .weight_decay = 0.1, .rules = {no_decay_below_two_dims()}});
  else
    optimizer = std::make_unique<Sgd>(engine, SgdOptions{.lr = 0.05, .momentum = 0.9});
  const auto part = small_batch / ranks;
  for (int step = 0; step < 4; ++step) {
    // State on the host finds its way to other ranks as well.
    if (step == 2) net->first->gain.set_requires_grad(false);
    engine.backward(small_loss(net, step, world.rank() * part, part));
    optimizer->step({.clip = 0.5, .clip_value = 0.1});
  }
  Trained trained;
  for (const auto& flat : engine.flats())
    for (const auto& share : flat->trained()) {
      (share.master.device().is_cpu() ? trained.host_state : trained.gpu_state) +=
          static_cast<std::int64_t>(share.master.nbytes());
      EXPECT_EQ(share.gradient.device(), world.device());
    }
  engine.check_equal();
  const auto whole = engine.full_parameters();
  for (const auto& parameter : net->parameters()) trained.weights.push_back(parameter.detach().cpu().to(at::kDouble));
  return trained;
}

double distance(const Trained& a, const Trained& b) {
  double most = 0;
  for (std::size_t at = 0; at < a.weights.size(); ++at)
    most = std::max(most, ((a.weights[at] - b.weights[at]).norm() / b.weights[at].norm()).item<double>());
  return most;
}

class GpuOffload : public ::testing::TestWithParam<int> {};

TEST_P(GpuOffload, ChangesNoNumber) {
  BONFIRE_SKIP_WITHOUT_GPU();
  run_gpu_ranks(GetParam(), [](World& world) {
    for (const auto what : {Sharded::optimizer, Sharded::gradients, Sharded::parameters})
      for (const auto offload : {Offload::optimizer, Offload::parameters}) {
        if (offload == Offload::parameters && what != Sharded::parameters) continue;
        SCOPED_TRACE(plan::name_of(what));
        const Setting exact{};
        const auto on_host = train(world, exact, what, offload), on_gpu = train(world, exact, what, Offload::none);
        EXPECT_EQ(on_host.gpu_state, 0);
        EXPECT_EQ(on_gpu.host_state, 0);
        EXPECT_EQ(on_host.host_state, on_gpu.gpu_state);
        EXPECT_LT(distance(on_host, on_gpu), 1e-12);
        // Larger than a piece of the update, so that copies and work take turns.
        const Setting large{.type = at::kFloat, .wide = 500'000, .adam = false};
        EXPECT_LT(distance(train(world, large, what, offload), train(world, large, what, Offload::none)), 1e-5);
        const Setting mixed{.type = at::kFloat, .compute = at::kBFloat16, .adam = false};
        EXPECT_LT(distance(train(world, mixed, what, offload), train(world, mixed, what, Offload::none)), 1e-2);
      }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, GpuOffload, ::testing::Values(1, 2),
                         [](const auto& info) { return "ranks" + std::to_string(info.param); });

}  // namespace
}  // namespace bonfire::offload_test
