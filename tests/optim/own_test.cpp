// What programs add to the optimizers: one of their own, torch's schedules of the learning rate, rules that come later, and
// hands on the gradients.
#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/schedulers/reduce_on_plateau_scheduler.h>
#include <torch/optim/schedulers/step_lr.h>
#include <torch/optim/sgd.h>

#include "bonfire/optim/clip.h"
#include "bonfire/optim/optimizer.h"
#include "bonfire/optim/torch_schedules.h"
#include "bonfire/shard/engine.h"
#include "tests/support/ranks.h"
#include "tests/support/small_net.h"

namespace bonfire::own_test {
namespace {

using testing::Division;
using testing::divisions;
using testing::run_ranks;
using testing::small_batch;
using testing::small_loss;
using testing::SmallNet;

constexpr int ranks = 4;

// Lion (Chen et al. 2023): the sign of an average of gradients.
class Lion final : public Optimizer {
 public:
  explicit Lion(Shares& shares) : Optimizer(shares, {.lr = 0.01, .weight_decay = 0.1}, {"exp_avg"}) {}

 protected:
  void update(std::span<const Range> ranges) override {
    for (const auto& range : ranges) {
      const auto gradient = range.gradient.to(range.master.scalar_type()) * range.gradient_scale;
      auto average = range.state[0];
      const auto direction = (average * 0.9 + gradient * 0.1).sign();
      range.master.mul_(1 - range.lr * range.weight_decay).sub_(direction * range.lr);
      average.mul_(0.99).add_(gradient * 0.01);
      if (range.low_precision.defined()) range.low_precision.copy_(range.master);
    }
  }
};

class Own : public ::testing::TestWithParam<Division> {
 protected:
  struct Twins {
    Twins(World& world, const Division& division)
        : rank(world.rank()),
          engine(shard(world.mesh({.replicate = ranks / division.shard, .shard = division.shard}), ours,
                       {.what = division.what, .buckets = {.bucket_bytes = 700, .first_bucket_bytes = 300}})) {}

    void backward(int step) {
      constexpr auto part = small_batch / ranks;
      engine.backward(small_loss(ours, step, rank * part, part));
      for (auto& parameter : theirs->parameters()) parameter.mutable_grad().reset();
      small_loss(theirs, step).backward();
    }
    void expect_equal() {
      const auto whole = engine.full_parameters();
      for (const auto& item : theirs->named_parameters())
        EXPECT_LE((*ours->named_parameters().find(item.key()) - item.value()).abs().max().item<double>(), 1e-12)
            << item.key();
    }

    int rank;
    SmallNet ours, theirs;
    Engine engine;
  };

  void on_ranks(const std::function<void(Twins&)>& body) {
    run_ranks(ranks, [&](World& world) {
      Twins twins(world, GetParam());
      body(twins);
    });
  }
};

TEST_P(Own, OptimizerNeedsOnlyItsUpdate) {
  on_ranks([&](Twins& twins) {
    Lion ours(twins.engine);
    std::map<std::string, at::Tensor> averages;
    for (int step = 0; step < 4; ++step) {
      twins.backward(step);
      ours.step({.clip = 0.3});
      torch::nn::utils::clip_grad_norm_(twins.theirs->parameters(), 0.3);
      const at::NoGradGuard no_grad;
      for (auto& item : twins.theirs->named_parameters()) {
        auto& average = averages[item.key()];
        if (!average.defined()) average = at::zeros_like(item.value());
        const auto direction = (average * 0.9 + item.value().grad() * 0.1).sign();
        item.value().mul_(1 - 0.01 * 0.1).sub_(direction * 0.01);
        average.mul_(0.99).add_(item.value().grad() * 0.01);
      }
    }
    twins.expect_equal();
    try {
      ours.prepare_on_device(false);
      ADD_FAILURE() << "a step on the device was prepared";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("cannot step without the host"), std::string::npos) << error.what();
    }
  });
}

TEST_P(Own, TorchsSchedulesSetTheLearningRate) {
  on_ranks([&](Twins& twins) {
    Sgd ours(twins.engine, {.lr = 0.1, .momentum = 0.9});
    torch::optim::SGD theirs(twins.theirs->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    ForSchedulers rates(ours);
    torch::optim::StepLR our_steps(rates, 2, 0.5), their_steps(theirs, 2, 0.5);
    using Plateau = torch::optim::ReduceLROnPlateauScheduler;
    Plateau our_plateau(rates, Plateau::min, 0.25f, 0), their_plateau(theirs, Plateau::min, 0.25f, 0);
    for (int step = 0; step < 6; ++step) {
      twins.backward(step);
      ours.step();
      theirs.step();
      our_steps.step();
      their_steps.step();
      const float metric = step < 3 ? 1.0f / static_cast<float>(step + 1) : 1.0f;
      our_plateau.step(metric);
      their_plateau.step(metric);
      EXPECT_DOUBLE_EQ(ours.lr(), theirs.param_groups()[0].options().get_lr()) << step;
    }
    EXPECT_LT(ours.lr(), 0.1 * 0.25);
    twins.expect_equal();
  });
}

TEST_P(Own, RulesMayComeLater) {
  on_ranks([&](Twins& twins) {
    Sgd ours(twins.engine, {.lr = 0.1, .momentum = 0.9, .rules = {no_decay_below_two_dims()}});
    std::vector<at::Tensor> gains, others;
    for (const auto& item : twins.theirs->named_parameters())
      (item.key().ends_with("gain") ? gains : others).push_back(item.value());
    const auto with = [](double lr, double decay) {
      return std::make_unique<torch::optim::SGDOptions>(torch::optim::SGDOptions(lr).momentum(0.9).weight_decay(decay));
    };
    using Group = torch::optim::OptimizerParamGroup;
    torch::optim::SGD theirs(std::vector<Group>{Group(gains, with(0.1, 0)), Group(others, with(0.1, 0))},
                             torch::optim::SGDOptions(0.1));
    for (int step = 0; step < 6; ++step) {
      if (step == 3) {
        ours.add_rule({[](const std::string& name, const at::Tensor&) { return name.ends_with("gain"); }, 0.5, 0.2});
        static_cast<torch::optim::SGDOptions&>(theirs.param_groups()[0].options()).weight_decay(0.2).lr(0.05);
      }
      twins.backward(step);
      ours.step();
      theirs.step();
    }
    twins.expect_equal();
  });
}

TEST_P(Own, GradientsCanBeSeenAndChangedByName) {
  on_ranks([&](Twins& twins) {
    Sgd ours(twins.engine, {.lr = 0.1});
    torch::optim::SGD theirs(twins.theirs->parameters(), torch::optim::SGDOptions(0.1));
    const auto refused = [&](const std::function<void()>& act) {
      try {
        act();
        ADD_FAILURE() << "gradients were looked at before there were any";
      } catch (const Error& error) {
        EXPECT_NE(std::string(error.what()).find("before any backward"), std::string::npos) << error.what();
      }
    };
    refused([&] { gradient_norm(twins.engine); });
    refused([&] { clip_norm(twins.engine, 1); });
    refused([&] { clip_values(twins.engine, 1); });
    refused([&] { for_each_gradient(twins.engine, [](const std::string&, const at::Tensor&) {}); });
    for (int step = 0; step < 3; ++step) {
      twins.backward(step);
      std::int64_t elements = 0;
      for_each_gradient(twins.engine, [&](const std::string& name, at::Tensor share) {
        elements += share.numel();
        if (name.ends_with("gain")) share.mul_(0.5);
      });
      std::int64_t all = 0;
      for (auto& item : twins.theirs->named_parameters()) {
        all += item.value().numel();
        if (item.key().ends_with("gain")) item.value().mutable_grad().mul_(0.5);
      }
      const auto& group = twins.engine.groups().shards;
      EXPECT_EQ(group.sum(static_cast<double>(elements)),
                static_cast<double>(all * (twins.engine.factors().optimizer > 1 ? 1 : group.size())));
      const double norm = torch::nn::utils::clip_grad_norm_(twins.theirs->parameters(), 0.2);
      EXPECT_NEAR(clip_norm(twins.engine, 0.2), norm, 1e-12 * norm);
      EXPECT_NEAR(gradient_norm(twins.engine), std::min(norm, 0.2), 1e-5);
      ours.step();
      theirs.step();
    }
    twins.expect_equal();
  });
}

INSTANTIATE_TEST_SUITE_P(Divided, Own, ::testing::ValuesIn(divisions()), [](const auto& info) {
  return std::string(plan::name_of(info.param.what)) + std::to_string(info.param.shard);
});

}  // namespace
}  // namespace bonfire::own_test
