// Gradients that travel in fewer bytes between replicas.
#include <limits>

#include <gtest/gtest.h>

#include "bonfire/comm/recorder.h"
#include "bonfire/optim/grad_scaler.h"
#include "tests/shard/plain.h"

namespace bonfire::compression_test {
namespace {

using testing::distance;
using testing::numbers;
using testing::Plain;
using testing::run_ranks;

TEST(Compression, HalfTheBytesAndNearlyTheSameGradients) {
  for (const auto compression : {plan::Compression::bf16, plan::Compression::fp16}) {
    run_ranks(2, [&](World& world) {
      Plain model(at::kFloat), reference(at::kFloat);
      const Mesh mesh = world.mesh({.replicate = 2});
      Engine engine = shard(mesh, model, {.reduction = {.compression = compression}});
      Engine exact = shard(mesh, reference);
      const auto x = numbers({4, 6}, world.rank(), at::kFloat);
      world.recorder().start();
      engine.backward(model.forward(x).pow(2).mean());
      const auto compressed_bytes = world.recorder().records().front().what.bytes;
      world.recorder().clear();
      exact.backward(reference.forward(x).pow(2).mean());
      EXPECT_EQ(compressed_bytes * 2, world.recorder().records().front().what.bytes);
      EXPECT_LT(distance(model.first->weight.grad(), reference.first->weight.grad()), 0.01);
    });
  }
}

// What PowerSGD leaves out of one step it sends in a later one: a constant gradient arrives whole in the long run.
TEST(Compression, PowerSgdFeedsItsErrorBack) {
  run_ranks(2, [](World& world) {
    torch::nn::Linear model(torch::nn::LinearOptions(16, 12).bias(true));
    model->to(at::kDouble);
    Engine engine =
        shard(world.mesh({.replicate = 2}), model,
              {.start = Start::broadcast, .reduction = {.compression = plan::Compression::powersgd, .powersgd_rank = 2}});
    const auto gradient = [&](int rank) { return numbers({12, 16}, 50 + rank); };
    const auto mean = (gradient(0) + gradient(1)) / 2;
    auto sum = at::zeros({12, 16}, at::kDouble);
    double error_of_one = 0;
    const int repeats = 60;
    for (int step = 0; step < repeats; ++step) {
      engine.backward((model->weight * gradient(world.rank())).sum() + model->bias.sum() * (world.rank() + 1));
      EXPECT_NEAR(model->bias.grad()[0].item<double>(), 1.5, 1e-12);  // vectors travel exactly
      if (step == 0) error_of_one = distance(model->weight.grad(), mean);
      sum += model->weight.grad();
      engine.spend_gradients();
    }
    EXPECT_GT(error_of_one, 0.3);
    EXPECT_LT(distance(sum / repeats, mean), error_of_one / 5);
  });
}

// One step that overflowed must not poison those that follow.
TEST(Compression, PowerSgdForgetsADroppedStep) {
  run_ranks(2, [](World& world) {
    torch::nn::Linear model(torch::nn::LinearOptions(16, 12).bias(true));
    model->to(at::kDouble);
    Engine engine =
        shard(world.mesh({.replicate = 2}), model,
              {.start = Start::broadcast, .reduction = {.compression = plan::Compression::powersgd, .powersgd_rank = 2}});
    Sgd optimizer(engine, {.lr = 0.01});
    for (int step = 0; step < 4; ++step) {
      const double factor = step == 1 && world.rank() == 0 ? std::numeric_limits<double>::infinity() : 1;
      engine.backward((model->weight * numbers({12, 16}, 50 + world.rank())).sum() * factor);
      EXPECT_EQ(optimizer.step({.skip_non_finite = true}).skipped, step == 1);
    }
    EXPECT_TRUE(model->weight.isfinite().all().item<bool>());
  });
}

// The error is kept in the units of the gradients, which a gradient scaler changes.
TEST(Compression, PowerSgdFollowsTheLossScale) {
  run_ranks(1, [](World& world) {
    std::vector<at::Tensor> sums;
    for (const double growth : {2.0, 1.5}) {
      torch::nn::Linear model(torch::nn::LinearOptions(16, 12).bias(false));
      model->to(at::kDouble);
      model->weight.detach().zero_();
      Engine engine =
          shard(world.mesh({}), model, {.reduction = {.compression = plan::Compression::powersgd, .powersgd_rank = 2}});
      Sgd optimizer(engine, {.lr = 1});
      GradScaler scaler({.scale = 4, .growth = growth, .growth_interval = 1});
      for (int step = 0; step < 5; ++step) {
        engine.backward(scaler.scale((model->weight * numbers({12, 16}, 50)).sum()));
        optimizer.step({.scaler = &scaler});
      }
      sums.push_back(model->weight.detach().clone());
    }
    EXPECT_LT(distance(sums[0], sums[1]), 1e-12);  // whatever the scale did, the same was sent
  });
}

TEST(Compression, PowerSgdIsExactForLowRankGradients) {
  run_ranks(3, [](World& world) {
    torch::nn::Linear model(torch::nn::LinearOptions(16, 12).bias(false));
    model->to(at::kDouble);
    Engine engine =
        shard(world.mesh({.replicate = 3}), model,
              {.start = Start::broadcast, .reduction = {.compression = plan::Compression::powersgd, .powersgd_rank = 2}});
    // All ranks' gradients are multiples of one matrix of rank 2.
    const auto low = numbers({12, 2}, 1).mm(numbers({2, 16}, 2));
    engine.backward((model->weight * low * (world.rank() + 1)).sum());
    EXPECT_LT(distance(model->weight.grad(), low * 2), 1e-12);
  });
}

}  // namespace
}  // namespace bonfire::compression_test
