#include "bonfire/optim/optimizer.h"

#include <gtest/gtest.h>

#include <cmath>
#include <memory>

#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>
#include <torch/optim/sgd.h>

#include "bonfire/comm/world.h"
#include "bonfire/optim/clip.h"
#include "bonfire/optim/grad_scaler.h"
#include "bonfire/optim/learning_rate.h"
#include "bonfire/shard/engine.h"

namespace bonfire::optimizer_test {
namespace {

// Two layers with equal weights, one trained by torch's optimizer and one by ours, on equal gradients.
struct Pair {
  Pair() {
    ours->to(at::kDouble);
    theirs->to(at::kDouble);
    const at::NoGradGuard no_grad;
    theirs->weight.copy_(ours->weight);
    theirs->bias.copy_(ours->bias);
  }

  static at::Tensor loss(torch::nn::Linear& layer, int step) {
    const auto x = at::arange(5, at::kDouble).add(step).sin();
    return layer->forward(x).sub(1).pow(2).sum();
  }

  void expect_equal() const {
    EXPECT_TRUE(at::allclose(ours->weight, theirs->weight, 1e-12, 1e-12));
    EXPECT_TRUE(at::allclose(ours->bias, theirs->bias, 1e-12, 1e-12));
  }

  torch::nn::Linear ours{5, 3}, theirs{5, 3};
};

template <class Ours>
void train_both(Pair& pair, Engine& engine, Ours& ours, torch::optim::Optimizer& theirs) {
  for (int step = 0; step < 6; ++step) {
    engine.backward(Pair::loss(pair.ours, step));
    ours.step();
    theirs.zero_grad();
    Pair::loss(pair.theirs, step).backward();
    theirs.step();
    pair.expect_equal();
  }
}

TEST(Optimizer, AdamIsTorchsWithItsOptions) {
  for (const bool amsgrad : {false, true}) {
    Pair pair;
    Engine engine = shard(World().mesh({}), pair.ours);
    Adam ours(engine, {.lr = 0.01, .beta1 = 0.8, .beta2 = 0.95, .weight_decay = 0.1, .amsgrad = amsgrad});
    torch::optim::Adam theirs(pair.theirs->parameters(),
                              torch::optim::AdamOptions(0.01).betas({0.8, 0.95}).weight_decay(0.1).amsgrad(amsgrad));
    train_both(pair, engine, ours, theirs);
  }
}

TEST(Optimizer, SgdIsTorchsWithItsOptions) {
  for (const bool nesterov : {false, true}) {
    Pair pair;
    Engine engine = shard(World().mesh({}), pair.ours);
    Sgd ours(engine, {.lr = 0.01, .momentum = 0.9, .weight_decay = 0.1, .nesterov = nesterov});
    torch::optim::SGD theirs(pair.theirs->parameters(),
                             torch::optim::SGDOptions(0.01).momentum(0.9).weight_decay(0.1).nesterov(nesterov));
    train_both(pair, engine, ours, theirs);
  }
}

// On the host a large share is updated in pieces; the parameters of one setting are not torn at its end.
TEST(Optimizer, LargeSharesAreUpdatedWhole) {
  torch::nn::Linear ours(1300, 1700), theirs(1300, 1700);
  {
    const at::NoGradGuard no_grad;
    theirs->weight.copy_(ours->weight);
    theirs->bias.copy_(ours->bias);
  }
  Engine engine = shard(World().mesh({}), ours);
  Sgd sgd(engine, {.lr = 0.1, .momentum = 0.5, .weight_decay = 0.5, .rules = {no_decay_below_two_dims()}});
  using Group = torch::optim::OptimizerParamGroup;
  const auto with = [](double decay) {
    return std::make_unique<torch::optim::SGDOptions>(torch::optim::SGDOptions(0.1).momentum(0.5).weight_decay(decay));
  };
  torch::optim::SGD torchs(std::vector<Group>{Group({theirs->weight}, with(0.5)), Group({theirs->bias}, with(0))},
                           torch::optim::SGDOptions(0.1));
  const auto x = at::arange(1300, at::kFloat).sin();
  for (int step = 0; step < 2; ++step) {
    engine.backward(ours->forward(x).pow(2).sum());
    sgd.step();
    torchs.zero_grad();
    theirs->forward(x).pow(2).sum().backward();
    torchs.step();
  }
  EXPECT_TRUE(at::allclose(ours->weight, theirs->weight, 1e-4, 1e-5));
  EXPECT_TRUE(at::allclose(ours->bias, theirs->bias, 1e-4, 1e-5));
}

TEST(Optimizer, MaximizeClimbs) {
  Pair pair;
  Engine engine = shard(World().mesh({}), pair.ours);
  Adam ours(engine, {.lr = 0.01, .maximize = true});
  const double before = Pair::loss(pair.ours, 0).item<double>();
  for (int step = 0; step < 10; ++step) {
    engine.backward(Pair::loss(pair.ours, 0));
    ours.step();
  }
  EXPECT_GT(Pair::loss(pair.ours, 0).item<double>(), before);
}

TEST(Optimizer, RulesGiveParametersTheirOwnSettings) {
  Pair pair;
  Engine engine = shard(World().mesh({}), pair.ours);
  const auto weight = pair.ours->weight.detach().clone(), bias = pair.ours->bias.detach().clone();
  Sgd ours(engine, {.lr = 1, .weight_decay = 0.5, .rules = {no_decay_below_two_dims()}});
  // A gradient of zero: only the decay moves anything.
  engine.backward(Pair::loss(pair.ours, 0) * 0);
  ours.step();
  EXPECT_TRUE(at::allclose(pair.ours->weight, weight * 0.5));
  EXPECT_TRUE(at::equal(pair.ours->bias, bias));

  Sgd slow(engine,
           {.lr = 1, .rules = {{[](const std::string& name, const at::Tensor&) { return name == "weight"; }, 0, 0}}});
  const auto still = pair.ours->weight.detach().clone();
  engine.backward(Pair::loss(pair.ours, 0));
  slow.step();
  EXPECT_TRUE(at::equal(pair.ours->weight, still));
  EXPECT_FALSE(at::equal(pair.ours->bias, bias));
}

TEST(Optimizer, ClipsByTheGlobalNorm) {
  Pair pair;
  Engine engine = shard(World().mesh({}), pair.ours);
  Sgd ours(engine, {.lr = 1});
  const auto weight = pair.ours->weight.detach().clone(), bias = pair.ours->bias.detach().clone();
  engine.backward(Pair::loss(pair.ours, 0) * 100);
  const double norm = gradient_norm(engine);
  const auto result = ours.step({.clip = 0.25});
  EXPECT_DOUBLE_EQ(result.gradient_norm, norm);
  EXPECT_GT(norm, 0.25);
  const double moved = std::sqrt((pair.ours->weight - weight).pow(2).sum().item<double>() +
                                 (pair.ours->bias - bias).pow(2).sum().item<double>());
  EXPECT_NEAR(moved, 0.25, 1e-6);
  EXPECT_EQ(clip_factor(0.2, 0.25), 1);
  EXPECT_EQ(clip_factor(100, 0), 1);
}

TEST(GradScaler, SkipsOverflowsAndRecovers) {
  Pair pair;
  Engine engine = shard(World().mesh({}), pair.ours);
  Adam ours(engine, {.lr = 0.01});
  GradScaler scaler({.scale = 1024, .growth_interval = 2});
  const auto before = pair.ours->weight.detach().clone();
  engine.backward(scaler.scale(Pair::loss(pair.ours, 0) * std::numeric_limits<double>::infinity()));
  EXPECT_TRUE(ours.step({.scaler = &scaler}).skipped);
  EXPECT_TRUE(at::equal(pair.ours->weight, before));
  EXPECT_EQ(scaler.scale(), 512);
  EXPECT_EQ(scaler.skipped(), 1);
  EXPECT_EQ(ours.steps(), 0);

  // The scale cancels exactly: a power of two.
  Engine plain = shard(World().mesh({}), pair.theirs);
  Adam theirs(plain, {.lr = 0.01});
  for (int step = 0; step < 2; ++step) {
    engine.backward(scaler.scale(Pair::loss(pair.ours, step)));
    EXPECT_FALSE(ours.step({.scaler = &scaler}).skipped);
    plain.backward(Pair::loss(pair.theirs, step));
    theirs.step();
  }
  EXPECT_TRUE(at::equal(pair.ours->weight, pair.theirs->weight));
  EXPECT_EQ(scaler.scale(), 1024);
}

TEST(Optimizer, NonFiniteGradientsCanBeSkipped) {
  Pair pair;
  Engine engine = shard(World().mesh({}), pair.ours);
  Sgd ours(engine, {.lr = 1});
  const auto before = pair.ours->weight.detach().clone();
  engine.backward(Pair::loss(pair.ours, 0) * std::nan(""));
  const auto result = ours.step({.skip_non_finite = true});
  EXPECT_TRUE(result.skipped);
  EXPECT_TRUE(std::isnan(result.gradient_norm));
  EXPECT_TRUE(at::equal(pair.ours->weight, before));
  engine.backward(Pair::loss(pair.ours, 0));
  EXPECT_FALSE(ours.step({.skip_non_finite = true}).skipped);
  EXPECT_TRUE(pair.ours->weight.isfinite().all().item<bool>());
}

// Law: a step that decides without the host gives the bits of one that the host decides, whatever the learning rate does,
// also around steps that change nothing and where the host hears of each only after the next has begun.
TEST(Optimizer, AStepOnTheDeviceIsTheSameStep) {
  const std::vector<ParameterRule> rules{no_decay_below_two_dims()};
  const auto make = [&](int kind, Engine& engine) -> std::unique_ptr<Optimizer> {
    if (kind == 0) return std::make_unique<AdamW>(engine, AdamOptions{.weight_decay = 0.1, .rules = rules});
    if (kind == 1)
      return std::make_unique<Adam>(engine, AdamOptions{.weight_decay = 0.1, .amsgrad = true, .maximize = true});
    return std::make_unique<Sgd>(engine, SgdOptions{.momentum = 0.9, .weight_decay = 0.1, .nesterov = true, .rules = rules});
  };
  // Gradients are these waves to the bit, wherever memory lies.
  const auto loss_of = [](torch::nn::Linear& layer, int step) {
    const auto wave = at::arange(15, at::kDouble).add(step).sin().mul(3).view({3, 5});
    return (layer->weight * wave).sum() + (layer->bias * wave.select(1, 0)).sum();
  };
  for (const int kind : {0, 1, 2})
    for (const double clip : {0.0, 0.5}) {
      Pair pair;
      Engine by_host = shard(World().mesh({}), pair.ours), by_device = shard(World().mesh({}), pair.theirs);
      const auto host = make(kind, by_host), device = make(kind, by_device);
      bool untold = false, changed = false;
      for (int step = 0; step < 9; ++step) {
        const double spoil = step == 4 || step == 5 ? std::nan("") : 1;
        by_host.backward(loss_of(pair.ours, step) * spoil);
        const auto loss = loss_of(pair.theirs, step) * spoil;
        by_device.backward(loss);
        host->set_lr(0.1 / (1 + step));
        device->set_lr(0.1 / (1 + step));
        const auto result = host->step({.clip = clip, .clip_value = 2, .skip_non_finite = true});
        device->prepare_on_device(untold);
        const double norm =
            device->step_on_device({.clip = clip, .clip_value = 2, .skip_non_finite = true}, loss.detach().view({1}))
                .item<double>();
        if (untold) device->told_by_device(changed);
        untold = true;
        changed = std::isfinite(norm);
        EXPECT_EQ(result.skipped, !changed);
        if (changed) {
          EXPECT_EQ(norm, result.gradient_norm);
        }
        EXPECT_TRUE(at::equal(pair.ours->weight, pair.theirs->weight)) << kind << " " << step;
        EXPECT_TRUE(at::equal(pair.ours->bias, pair.theirs->bias)) << kind << " " << step;
      }
      device->told_by_device(changed);
      EXPECT_EQ(device->steps(), host->steps());
    }
}

TEST(LearningRate, WarmsUpAndDecays) {
  const LearningRate cosine{.peak = 1, .least = 0.1, .warmup = 10, .steps = 110, .decay = Decay::cosine};
  EXPECT_DOUBLE_EQ(cosine.at(0), 0.1);
  EXPECT_DOUBLE_EQ(cosine.at(9), 1);
  EXPECT_NEAR(cosine.at(59), 0.55, 1e-12);
  EXPECT_DOUBLE_EQ(cosine.at(109), 0.1);  // the last step
  EXPECT_DOUBLE_EQ(cosine.at(1000), 0.1);
  const LearningRate linear{.peak = 1, .least = 0, .warmup = 0, .steps = 100, .decay = Decay::linear};
  EXPECT_EQ(linear.at(0), 1);
  EXPECT_NEAR(linear.at(33), 2.0 / 3, 1e-12);
  EXPECT_EQ(linear.at(99), 0);
  const LearningRate constant{.peak = 1, .steps = 100};
  EXPECT_EQ(constant.at(99), 1);
  for (int step = 9; step < 109; ++step) EXPECT_GT(cosine.at(step), cosine.at(step + 1));
}

// Whatever the numbers of steps, the last one is at the least rate, unless the warm-up lasts that long or it is the only
// one.
TEST(LearningRate, EndsAtTheLeastRate) {
  for (const auto decay : {Decay::linear, Decay::cosine})
    for (std::int64_t steps = 1; steps < 6; ++steps)
      for (std::int64_t warmup = 0; warmup < 6; ++warmup) {
        const LearningRate rate{.peak = 1, .least = 0.25, .warmup = warmup, .steps = steps, .decay = decay};
        const std::int64_t top = std::max<std::int64_t>(warmup - 1, 0);
        SCOPED_TRACE(::testing::Message() << steps << " steps, " << warmup << " of them warm-up");
        if (steps - 1 > top) EXPECT_EQ(rate.at(steps - 1), 0.25);
        EXPECT_EQ(rate.at(top), 1);
      }
}

}  // namespace
}  // namespace bonfire::optimizer_test
