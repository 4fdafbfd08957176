// Replicas of any module, marked or not: the engine with a sharding factor of 1.
#include "bonfire/shard/engine.h"

#include <gtest/gtest.h>

#include <torch/nn/modules/batchnorm.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include "bonfire/base/error.h"
#include "bonfire/comm/recorder.h"
#include "bonfire/optim/optimizer.h"
#include "tests/shard/plain.h"
#include "tests/support/ranks.h"

namespace bonfire::data_parallel_test {
namespace {

using testing::distance;
using testing::numbers;
using testing::Plain;
using testing::run_ranks;

struct Case {
  int accumulation = 1;
  plan::BucketOptions buckets{.bucket_bytes = 200, .first_bucket_bytes = 50};
  bool adam = true;
  std::function<bool(int step)> use_extra = [](int) { return true; };
  std::optional<at::ScalarType> compute{};
  ReductionOptions reduction{};
  at::ScalarType dtype = at::kDouble;
  double clip = 0.5;
};

constexpr int samples = 12, steps = 4;

// Trains `Plain` and gives back rank 0's final parameters as one vector.
at::Tensor train(int ranks, const Case& run, std::vector<double>* losses = nullptr) {
  at::Tensor result;
  run_ranks(ranks, [&](World& world) {
    Plain model(run.dtype);
    Engine engine = shard(world.mesh({.replicate = ranks}), model,
                          {.precision = {.parameters = run.compute}, .buckets = run.buckets, .reduction = run.reduction});
    std::unique_ptr<Optimizer> optimizer;
    if (run.adam)
      optimizer = std::make_unique<AdamW>(engine, AdamOptions{.lr = 0.05, .weight_decay = 0.1});
    else
      optimizer = std::make_unique<Sgd>(engine, SgdOptions{.lr = 0.1, .momentum = 0.9});
    const int part = samples / ranks / run.accumulation;
    const auto input_dtype = run.compute.value_or(run.dtype);
    for (int step = 0; step < steps; ++step) {
      const auto x = numbers({samples, 6}, step, input_dtype), y = numbers({samples, 2}, 1000 + step, input_dtype);
      double sum = 0;
      for (int micro = 0; micro < run.accumulation; ++micro) {
        const auto begin = world.rank() * (samples / ranks) + micro * part;
        const auto out = model.forward(x.narrow(0, begin, part), run.use_extra(step));
        const auto loss = (out - y.narrow(0, begin, part)).pow(2).to(at::kDouble).mean() / run.accumulation;
        sum += loss.item<double>();
        if (micro + 1 < run.accumulation)
          engine.accumulate(loss);
        else
          engine.backward(loss);
      }
      optimizer->step({.clip = run.clip});
      const double mean = world.group().sum(sum) / ranks;
      if (losses && world.rank() == 0) losses->push_back(mean);
    }
    engine.check_equal();
    if (world.rank() != 0) return;
    std::vector<at::Tensor> flat;
    for (auto& parameter : model.parameters()) flat.push_back(parameter.detach().to(at::kDouble).reshape(-1));
    result = at::cat(flat);
  });
  return result;
}

// Law 1: any number of ranks gives the weights of one.
TEST(DataParallel, AnyNumberOfRanksGivesTheWeightsOfOne) {
  for (const bool adam : {true, false})
    for (const int accumulation : {1, 3}) {
      const Case run{.accumulation = accumulation, .adam = adam};
      const auto alone = train(1, {.adam = adam});
      for (const int ranks : {1, 2, 3, 4}) {
        if (samples % (ranks * accumulation) != 0) continue;
        EXPECT_LT(distance(train(ranks, run), alone), 1e-12) << ranks << " ranks, accumulation " << accumulation;
      }
    }
}

// The engine with one rank is what torch itself does.
TEST(DataParallel, OneRankIsTorch) {
  Plain model;
  torch::optim::AdamW optimizer(model.parameters(), torch::optim::AdamWOptions(0.05).weight_decay(0.1));
  for (int step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    const auto x = numbers({samples, 6}, step), y = numbers({samples, 2}, 1000 + step);
    (model.forward(x) - y).pow(2).mean().backward();
    double squares = 0;
    for (auto& parameter : model.parameters())
      if (parameter.grad().defined()) squares += parameter.grad().pow(2).sum().item<double>();
    const double norm = std::sqrt(squares);
    for (auto& parameter : model.parameters())
      if (parameter.grad().defined() && norm > 0.5) parameter.mutable_grad().mul_(0.5 / (norm + 1e-6));
    optimizer.step();
  }
  std::vector<at::Tensor> flat;
  for (auto& parameter : model.parameters()) flat.push_back(parameter.detach().reshape(-1));
  EXPECT_LT(distance(train(1, {}), at::cat(flat)), 1e-12);
}

// How parameters are cut into buckets changes nothing but the collectives. (The norm that clips is a sum over buckets, so
// with clipping its last bit could change.)
TEST(DataParallel, BucketsDoNotMatter) {
  const auto small = train(2, {.buckets = {.bucket_bytes = 1, .first_bucket_bytes = 1}, .clip = 0});
  EXPECT_TRUE(at::equal(small, train(2, {.buckets = {.bucket_bytes = 1 << 20, .first_bucket_bytes = 1 << 20}, .clip = 0})));
}

TEST(DataParallel, TwoRunsGiveEqualBits) { EXPECT_TRUE(at::equal(train(3, {}), train(3, {}))); }

TEST(DataParallel, UnusedParametersContributeZero) {
  const Case sometimes{.use_extra = [](int step) { return step % 2 == 1; }};
  const auto alone = train(1, sometimes);
  for (const int ranks : {2, 3}) EXPECT_LT(distance(train(ranks, sometimes), alone), 1e-12);
}

TEST(DataParallel, UnusedOnSomeRanksOnly) {
  run_ranks(2, [](World& world) {
    Plain model;
    Engine engine = shard(world.mesh({.replicate = 2}), model, {.buckets = {.bucket_bytes = 1, .first_bucket_bytes = 1}});
    for (int step = 0; step < 3; ++step) {
      engine.backward(model.forward(numbers({4, 6}, 7), world.rank() == step % 2).pow(2).mean());
      // Half of what one rank alone computes, since the other contributes zero.
      Plain reference;
      reference.forward(numbers({4, 6}, 7)).pow(2).mean().backward();
      EXPECT_LT(distance(model.extra->weight.grad(), reference.extra->weight.grad() / 2), 1e-12);
      EXPECT_FALSE(model.frozen->weight.grad().defined());
      engine.spend_gradients();
    }
  });
}

// Gradients are reduced while backward runs: when the last ones arrive, the first buckets are on their way.
TEST(DataParallel, ReductionBeginsBeforeBackwardEnds) {
  run_ranks(2, [](World& world) {
    Plain model;
    Engine engine = shard(world.mesh({.replicate = 2}), model, {.buckets = {.bucket_bytes = 1, .first_bucket_bytes = 1}});
    Nanoseconds end_of_backward = 0;
    auto x = numbers({4, 6}, 7).set_requires_grad(true);
    engine.backward(model.forward(x).pow(2).mean());
    engine.spend_gradients();
    world.recorder().start();
    // The gradient of the input comes last of all.
    x.register_hook([&](const at::Tensor&) { end_of_backward = now_ns(); });
    engine.backward(model.forward(x).pow(2).mean());
    world.recorder().stop();
    const auto records = world.recorder().records();
    ASSERT_EQ(records.size(), 6u);  // first, extra and last: a weight and a bias each
    EXPECT_LT(records[3].start, end_of_backward);
  });
}

TEST(DataParallel, AccumulationMovesNothing) {
  run_ranks(2, [](World& world) {
    Plain model;
    Engine engine = shard(world.mesh({.replicate = 2}), model);
    engine.backward(model.forward(numbers({4, 6}, 7)).pow(2).mean());
    engine.spend_gradients();
    world.recorder().start();
    for (int micro = 0; micro < 3; ++micro) engine.accumulate(model.forward(numbers({4, 6}, 7)).pow(2).mean());
    EXPECT_TRUE(world.recorder().records().empty());
    engine.backward(model.forward(numbers({4, 6}, 7)).pow(2).mean());
    EXPECT_EQ(world.recorder().records().size(), 1u);
  });
}

TEST(DataParallel, TorchOptimizersWorkToo) {
  at::Tensor ours, theirs;
  for (const bool plain : {false, true})
    run_ranks(2, [&](World& world) {
      Plain model;
      Engine engine = shard(world.mesh({.replicate = 2}), model);
      AdamW own(engine, {.lr = 0.05, .weight_decay = 0.1});
      torch::optim::AdamW torchs(model.parameters(), torch::optim::AdamWOptions(0.05).weight_decay(0.1));
      for (int step = 0; step < steps; ++step) {
        if (plain) torchs.zero_grad();
        engine.backward(model.forward(numbers({4, 6}, step * 2 + world.rank())).pow(2).mean());
        plain ? void(torchs.step()) : void(own.step());
      }
      if (world.rank() == 0) (plain ? theirs : ours) = model.first->weight.detach().clone();
    });
  EXPECT_LT(distance(ours, theirs), 1e-12);
}

// Gradients of some microbatches are each rank's own: an update with them would make the replicas different.
template <class TorchOptimizer, class Options>
void expect_updates_with_whole_steps_only(const Options& options) {
  const auto loss_of = [](Plain& model, int number) { return model.forward(numbers({4, 6}, number)).pow(2).mean() / 2; };
  Plain plain;
  TorchOptimizer plainly(plain.parameters(), options);
  for (int step = 0; step < steps; ++step) {
    plainly.zero_grad();
    for (int at = 0; at < 4; ++at) (loss_of(plain, 4 * step + at) / 2).backward();
    plainly.step();
  }
  run_ranks(2, [&](World& world) {
    Plain model;
    Engine engine = shard(world.mesh({.replicate = 2}), model);
    TorchOptimizer optimizer(model.parameters(), options);
    for (int step = 0; step < steps; ++step) {
      optimizer.zero_grad();
      engine.accumulate(loss_of(model, 4 * step + world.rank()));
      for (const auto& parameter : model.parameters()) EXPECT_FALSE(parameter.grad().defined());
      optimizer.step();  // too early
      engine.check_equal();
      engine.backward(loss_of(model, 4 * step + 2 + world.rank()));
      optimizer.step();
      engine.check_equal();
    }
    EXPECT_LT(distance(model.first->weight.detach(), plain.first->weight.detach()), 1e-12);
    EXPECT_LT(distance(model.last->weight.detach(), plain.last->weight.detach()), 1e-12);
  });
}

TEST(DataParallel, TorchOptimizersFindNoGradientsOfAPartOfAStep) {
  expect_updates_with_whole_steps_only<torch::optim::SGD>(torch::optim::SGDOptions(0.1));
  expect_updates_with_whole_steps_only<torch::optim::AdamW>(torch::optim::AdamWOptions(0.05));
}

TEST(DataParallel, FreezingAndThawingBetweenSteps) {
  run_ranks(2, [](World& world) {
    Plain model;
    Engine engine = shard(world.mesh({.replicate = 2}), model);
    AdamW optimizer(engine, {.lr = 0.05});
    const auto step = [&] {
      engine.backward(model.forward(numbers({4, 6}, 3)).pow(2).mean());
      optimizer.step();
    };
    step();
    const auto before = model.last->weight.detach().clone(), other = model.first->weight.detach().clone();
    model.last->weight.set_requires_grad(false);
    step();
    EXPECT_TRUE(at::equal(model.last->weight, before));
    EXPECT_FALSE(at::equal(model.first->weight, other));
    model.last->weight.set_requires_grad(true);
    step();
    EXPECT_FALSE(at::equal(model.last->weight, before));
    engine.check_equal();
  });
}

TEST(DataParallel, RanksMayRunOutOfData) {
  run_ranks(3, [](World& world) {
    Plain model;
    Engine engine = shard(world.mesh({.replicate = 3}), model, {.uneven_inputs = true});
    Sgd optimizer(engine, {.lr = 0.1});
    Plain reference;
    // Rank r has r + 1 batches. In step s the ranks that still have one are averaged.
    for (int step = 0; step <= world.rank(); ++step) {
      engine.backward(model.forward(numbers({4, 6}, 10 * world.rank() + step)).pow(2).mean());
      optimizer.step();
    }
    engine.finish([&] { optimizer.step(); });
    for (int step = 0; step < 3; ++step) {
      at::Tensor loss = at::zeros({}, at::kDouble);
      for (int rank = step; rank < 3; ++rank)
        loss = loss + reference.forward(numbers({4, 6}, 10 * rank + step)).pow(2).mean() / (3 - step);
      reference.zero_grad();
      loss.backward();
      const at::NoGradGuard no_grad;
      for (auto& parameter : reference.parameters())
        if (parameter.grad().defined()) parameter.sub_(parameter.grad() * 0.1);
    }
    for (std::size_t at = 0; at < model.parameters().size(); ++at)
      EXPECT_LT(distance(model.parameters()[at], reference.parameters()[at]), 1e-12);
  });
}

TEST(DataParallel, BuffersAreKeptEqual) {
  run_ranks(2, [](World& world) {
    torch::nn::BatchNorm1d norm(torch::nn::BatchNorm1dOptions(6));
    Engine engine = shard(world.mesh({.replicate = 2}), norm);
    engine.backward(norm->forward(numbers({4, 6}, world.rank(), at::kFloat)).pow(2).mean());
    EXPECT_EQ(norm->num_batches_tracked.item<std::int64_t>(), 1);
    const double sum = norm->running_mean.sum().item<double>();
    EXPECT_NE(sum, 0);
    EXPECT_EQ(world.group().max(sum), sum);
    EXPECT_EQ(-world.group().max(-sum), sum);
  });
}

std::string error_of(int ranks, const std::function<void(World&)>& body) {
  try {
    run_ranks(ranks, body);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(DataParallel, ParametersAreCheckedAtTheStart) {
  const auto different = [](World& world) {
    Plain model;
    if (world.rank() == 1) {
      const at::NoGradGuard no_grad;
      model.extra->bias[3] += 1e-9;
    }
    Engine engine = shard(world.mesh({.replicate = 2}), model, {.start = Start::check});
  };
  EXPECT_NE(error_of(2, different).find("parameter 'extra.bias' differs between rank 0 and rank 1"), std::string::npos)
      << error_of(2, different);

  const auto other_shape = [](World& world) {
    torch::nn::Linear model(4, world.rank() + 1);
    Engine engine = shard(world.mesh({.replicate = 2}), model);
  };
  EXPECT_NE(error_of(2, other_shape).find("has another name, shape or dtype on rank 1 than on rank 0"), std::string::npos);
}

// As with DDP: layers that each rank has initialised for itself begin with rank 0's values.
TEST(DataParallel, RankZeroGivesTheFirstValues) {
  run_ranks(3, [](World& world) {
    const auto mine = numbers({4, 4}, static_cast<std::uint64_t>(world.rank()), at::kFloat);
    torch::nn::Linear model(4, 4);
    model->weight.set_data(mine);
    Engine engine = shard(world.mesh({.replicate = 3}), model);
    EXPECT_TRUE(at::equal(model->weight, numbers({4, 4}, 0, at::kFloat)));
    engine.check_equal();
  });
}

// Dtypes may be mixed in one module: each keeps its own, through the first backward and through freezing.
TEST(DataParallel, MixedDtypesStayMixed) {
  struct Mixed : torch::nn::Module {
    Mixed() {
      a = register_parameter("a", numbers({5, 3}, 1, at::kFloat));
      b = register_parameter("b", numbers({3}, 2, at::kDouble));
      c = register_parameter("c", numbers({5}, 3, at::kFloat));
    }
    at::Tensor forward(const at::Tensor& x) { return (a.mv(x) + c).to(at::kDouble).pow(2).sum() + b.pow(2).sum(); }
    at::Tensor a, b, c;
  };
  run_ranks(2, [](World& world) {
    Mixed model;
    Engine engine = shard(world.mesh({.replicate = 2}), model);
    Sgd optimizer(engine, {.lr = 0.1});
    const auto b = model.b.detach().clone();
    for (int step = 0; step < 3; ++step) {
      engine.backward(model.forward(numbers({3}, step, at::kFloat)));
      optimizer.step();
      if (step == 1) model.c.set_requires_grad(false);
    }
    EXPECT_EQ(model.a.scalar_type(), at::kFloat);
    EXPECT_EQ(model.b.scalar_type(), at::kDouble);
    EXPECT_EQ(model.c.scalar_type(), at::kFloat);
    EXPECT_LT(distance(model.b, b * 0.8 * 0.8 * 0.8), 1e-15);  // in fp32 it would be off by 1e-8
  });
}

TEST(DataParallel, RefusesWhatItWouldIgnore) {
  const auto other_axis = [](World& world) {
    Plain model;
    Engine engine = shard(world.mesh({.pipeline = 2}), model);
  };
  EXPECT_NE(error_of(2, other_axis).find("mesh axis pipeline is 2"), std::string::npos);
  const auto second_engine = [](World& world) {
    Plain model;
    Engine engine = shard(world.mesh({}), model), again = shard(world.mesh({}), model);
  };
  EXPECT_NE(error_of(1, second_engine).find("parameter 'first.weight' has a gradient hook already"), std::string::npos);
}

TEST(DataParallel, BackwardGoesThroughTheEngine) {
  World world;
  Plain model;
  Engine engine = shard(world.mesh({}), model);
  try {
    model.forward(numbers({4, 6}, 7)).pow(2).mean().backward();
    FAIL();
  } catch (const std::exception& error) {
    EXPECT_NE(std::string(error.what()).find("call engine.backward(loss) instead of loss.backward()"), std::string::npos)
        << error.what();
  }
}

TEST(DataParallel, MixedPrecisionKeepsMasters) {
  std::vector<double> exact, rounded;
  train(2, {.dtype = at::kFloat}, &exact);
  train(2, {.compute = at::kBFloat16, .dtype = at::kFloat}, &rounded);
  for (int step = 0; step < steps; ++step) EXPECT_NEAR(rounded[step], exact[step], 0.03 * exact[step]);

  run_ranks(1, [](World& world) {
    Plain model(at::kFloat);
    Engine engine = shard(world.mesh({}), model, {.precision = {.parameters = at::kBFloat16}});
    EXPECT_EQ(model.first->weight.scalar_type(), at::kBFloat16);
    EXPECT_EQ(engine.flats().front()->trained().front().master.scalar_type(), at::kFloat);
    EXPECT_EQ(engine.flats().front()->trained().front().gradient.scalar_type(), at::kFloat);
    // Steps far smaller than bf16 can tell apart add up in the masters.
    Sgd optimizer(engine, {.lr = 1e-5});
    const auto before = model.last->weight.detach().clone();
    for (int step = 0; step < 3; ++step) {
      engine.backward(model.forward(numbers({4, 6}, 7, at::kBFloat16)).pow(2).mean());
      optimizer.step();
    }
    EXPECT_TRUE(at::equal(model.last->weight, before));
    const auto& share = engine.flats().front()->trained().front();
    EXPECT_FALSE(at::equal(share.master, share.low_precision().to(at::kFloat)));
  });
}

}  // namespace
}  // namespace bonfire::data_parallel_test
