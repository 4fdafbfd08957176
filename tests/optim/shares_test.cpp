// Optimizers over shares: on four ranks, however their state is divided, they do what torch's do on one.
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <memory>

#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include "bonfire/comm/recorder.h"
#include "bonfire/optim/clip.h"
#include "bonfire/optim/grad_scaler.h"
#include "bonfire/optim/optimizer.h"
#include "bonfire/shard/engine.h"
#include "tests/support/ranks.h"
#include "tests/support/small_net.h"

namespace bonfire::shares_test {
namespace {

using testing::Division;
using testing::divisions;
using testing::run_ranks;
using testing::small_batch;
using testing::small_loss;
using testing::SmallNet;

constexpr int ranks = 4;

std::string name_of_division(const ::testing::TestParamInfo<Division>& info) {
  return std::string(plan::name_of(info.param.what)) + std::to_string(info.param.shard);
}

// Ours on this rank, and beside it the whole on one, which never communicates.
struct Twins {
  explicit Twins(World& world, const Division& division, ShardOptions options = {})
      : rank(world.rank()),
        engine(shard(world.mesh({.replicate = ranks / division.shard, .shard = division.shard}), ours,
                     with(std::move(options), division))) {}

  static ShardOptions with(ShardOptions options, const Division& division) {
    options.what = division.what;
    options.buckets = {.bucket_bytes = 700, .first_bucket_bytes = 300};
    return options;
  }

  void backward(int step) {
    const auto part = small_batch / ranks;
    engine.backward(small_loss(ours, step, rank * part, part));
    for (auto& parameter : theirs->parameters()) parameter.mutable_grad().reset();
    small_loss(theirs, step).backward();
  }

  void expect_equal(double tolerance = 1e-12) {
    const auto whole = engine.full_parameters();
    for (const auto& item : theirs->named_parameters()) {
      const auto& mine = *ours->named_parameters().find(item.key());
      EXPECT_LE((mine - item.value()).abs().max().item<double>(), tolerance) << item.key();
    }
  }

  int rank;
  SmallNet ours, theirs;
  Engine engine;
};

class OverShares : public ::testing::TestWithParam<Division> {
 protected:
  void on_ranks(const std::function<void(World&)>& body) { run_ranks(ranks, body); }
};

struct Kind {
  const char* name;
  std::function<std::unique_ptr<Optimizer>(Engine&)> ours;
  std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<at::Tensor>)> theirs;
};

const std::vector<Kind>& kinds() {
  using namespace torch::optim;
  static const std::vector<Kind> all{
      {"adam",
       [](Engine& e) {
         return std::make_unique<bonfire::Adam>(e, bonfire::AdamOptions{.lr = 0.01, .beta2 = 0.95, .weight_decay = 0.1});
       },
       [](auto p) {
         return std::make_unique<torch::optim::Adam>(p,
                                                     torch::optim::AdamOptions(0.01).betas({0.9, 0.95}).weight_decay(0.1));
       }},
      {"amsgrad",
       [](Engine& e) {
         return std::make_unique<bonfire::Adam>(e, bonfire::AdamOptions{.lr = 0.01, .beta2 = 0.9, .amsgrad = true});
       },
       [](auto p) {
         return std::make_unique<torch::optim::Adam>(p, torch::optim::AdamOptions(0.01).betas({0.9, 0.9}).amsgrad(true));
       }},
      {"adamw",
       [](Engine& e) { return std::make_unique<bonfire::AdamW>(e, bonfire::AdamOptions{.lr = 0.01, .weight_decay = 0.1}); },
       [](auto p) { return std::make_unique<torch::optim::AdamW>(p, AdamWOptions(0.01).weight_decay(0.1)); }},
      {"sgd", [](Engine& e) { return std::make_unique<Sgd>(e, SgdOptions{.lr = 0.1, .weight_decay = 0.1}); },
       [](auto p) { return std::make_unique<SGD>(p, SGDOptions(0.1).weight_decay(0.1)); }},
      {"momentum",
       [](Engine& e) { return std::make_unique<Sgd>(e, SgdOptions{.lr = 0.1, .momentum = 0.9, .dampening = 0.2}); },
       [](auto p) { return std::make_unique<SGD>(p, SGDOptions(0.1).momentum(0.9).dampening(0.2)); }},
      {"nesterov",
       [](Engine& e) { return std::make_unique<Sgd>(e, SgdOptions{.lr = 0.1, .momentum = 0.9, .nesterov = true}); },
       [](auto p) { return std::make_unique<SGD>(p, SGDOptions(0.1).momentum(0.9).nesterov(true)); }},
  };
  return all;
}

TEST_P(OverShares, EveryOptimizerIsTorchs) {
  on_ranks([&](World& world) {
    for (const auto& kind : kinds()) {
      SCOPED_TRACE(kind.name);
      Twins twins(world, GetParam());
      const auto ours = kind.ours(twins.engine);
      const auto theirs = kind.theirs(twins.theirs->parameters());
      for (int step = 0; step < 4; ++step) {
        twins.backward(step);
        ours->step();
        theirs->step();
      }
      EXPECT_EQ(ours->steps(), 4);
      twins.expect_equal();
    }
  });
}

TEST_P(OverShares, StateIsOneShareOfEveryTrainedElement) {
  on_ranks([&](World& world) {
    Twins twins(world, GetParam());
    twins.ours->first->linear->weight.set_requires_grad(false);
    AdamW ours(twins.engine);
    EXPECT_EQ(ours.state_bytes(), 0);
    for (int step = 0; step < 2; ++step) {
      twins.backward(step);
      ours.step();
    }
    std::int64_t elements = 0;
    for (const auto& flat : twins.engine.flats()) elements += flat->layout().trained_elements();
    EXPECT_EQ(ours.state_bytes(), elements / GetParam().shard * 2 * 8);
  });
}

TEST_P(OverShares, RulesHoldByName) {
  on_ranks([&](World& world) {
    Twins twins(world, GetParam());
    const auto is_gain = [](const std::string& name, const at::Tensor&) { return name.ends_with("gain"); };
    AdamW ours(twins.engine, {.lr = 0.01, .weight_decay = 0.3, .rules = {{is_gain, 5, 0.2}, no_decay_below_two_dims()}});
    std::vector<at::Tensor> gains, vectors, matrices;
    for (const auto& item : twins.theirs->named_parameters())
      (item.key().ends_with("gain") ? gains : item.value().dim() < 2 ? vectors : matrices).push_back(item.value());
    using Group = torch::optim::OptimizerParamGroup;
    const auto with = [](double lr, double decay) {
      return std::make_unique<torch::optim::AdamWOptions>(torch::optim::AdamWOptions(lr).weight_decay(decay));
    };
    torch::optim::AdamW theirs(
        std::vector<Group>{Group(gains, with(0.05, 0.2)), Group(vectors, with(0.01, 0)), Group(matrices, with(0.01, 0.3))});
    for (int step = 0; step < 3; ++step) {
      twins.backward(step);
      ours.step();
      theirs.step();
    }
    twins.expect_equal();
  });
}

TEST_P(OverShares, ClipsByNormAndByValueExactly) {
  on_ranks([&](World& world) {
    Twins twins(world, GetParam());
    Sgd ours(twins.engine, {.lr = 0.1, .momentum = 0.9});
    torch::optim::SGD theirs(twins.theirs->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    for (int step = 0; step < 4; ++step) {
      twins.backward(step);
      const double limit = step % 2 == 0 ? 0.05 : 0;
      if (limit > 0) torch::nn::utils::clip_grad_value_(twins.theirs->parameters(), limit);
      const double norm = torch::nn::utils::clip_grad_norm_(twins.theirs->parameters(), 0.2);
      const auto result = ours.step({.clip = 0.2, .clip_value = limit});
      EXPECT_GT(norm, 0.2);
      EXPECT_NEAR(result.gradient_norm, norm, 1e-12 * norm);
      theirs.step();
    }
    twins.backward(4);
    torch::nn::utils::clip_grad_value_(twins.theirs->parameters(), 0.03);
    EXPECT_TRUE(std::isnan(ours.step({.clip_value = 0.03}).gradient_norm));
    theirs.step();
    twins.expect_equal();
  });
}

// What is trained changes between steps, so shares change their parameters. State goes along; what is thawed begins anew,
// as with an optimizer that has never seen it.
TEST_P(OverShares, StateFollowsFrozenAndThawedParameters) {
  on_ranks([&](World& world) {
    for (const bool adam : {true, false}) {
      Twins twins(world, GetParam());
      std::unique_ptr<Optimizer> ours;
      std::unique_ptr<torch::optim::Optimizer> theirs;
      const auto& kind = kinds()[adam ? 2 : 4];
      ours = kind.ours(twins.engine);
      theirs = kind.theirs(twins.theirs->parameters());
      const auto train = [&](const char* name, bool trained) {
        twins.ours->named_parameters().find(name)->set_requires_grad(trained);
        auto& other = *twins.theirs->named_parameters().find(name);
        other.set_requires_grad(trained);
        if (!trained) theirs->state().erase(other.unsafeGetTensorImpl());
      };
      int step = 0;
      const auto steps = [&](int count) {
        for (int i = 0; i < count; ++i, ++step) {
          twins.backward(step);
          ours->step();
          theirs->step();
        }
        twins.expect_equal();
      };
      train("first.linear.weight", false);
      train("second.gain", false);
      steps(3);
      train("first.linear.weight", true);
      steps(2);
      train("second.gain", true);
      train("first.gain", false);
      train("head.bias", false);
      steps(2);
      train("head.bias", true);
      steps(2);
    }
  });
}

// The shares of one rank alone hold an infinity, and all ranks drop the step.
TEST_P(OverShares, ScalerDecidesAlikeOnAllRanks) {
  on_ranks([&](World& world) {
    for (const double clip_value : {0.0, 0.5}) {
      Twins twins(world, GetParam());
      AdamW ours(twins.engine, {.lr = 0.01});
      torch::optim::AdamW theirs(twins.theirs->parameters(), torch::optim::AdamWOptions(0.01).weight_decay(0));
      GradScaler scaler({.scale = 1024});
      const auto part = small_batch / ranks;
      for (int step = 0; step < 4; ++step) {
        twins.engine.backward(scaler.scale(small_loss(twins.ours, step, twins.rank * part, part)));
        const bool bad = step == 1;
        const auto& shards = twins.engine.groups().shards;
        if (bad && shards.rank() == shards.size() - 1)
          twins.engine.flats().back()->trained().back().gradient[0] = std::numeric_limits<double>::infinity();
        const auto result = ours.step({.clip = 0.5, .clip_value = clip_value, .scaler = &scaler});
        EXPECT_EQ(result.skipped, bad);
        if (bad) continue;
        theirs.zero_grad();
        small_loss(twins.theirs, step).backward();
        if (clip_value > 0) torch::nn::utils::clip_grad_value_(twins.theirs->parameters(), clip_value);
        torch::nn::utils::clip_grad_norm_(twins.theirs->parameters(), 0.5);
        theirs.step();
      }
      EXPECT_EQ(scaler.scale(), 512);
      EXPECT_EQ(scaler.skipped(), 1);
      EXPECT_EQ(ours.steps(), 3);
      twins.expect_equal();
    }
  });
}

// The norm is one all-reduce of eight bytes, and only where somebody wants to know it.
TEST_P(OverShares, NormCostsEightBytesOrNothing) {
  on_ranks([&](World& world) {
    Twins twins(world, GetParam());
    Sgd ours(twins.engine, {.lr = 0.1});
    const auto norms = [&](const StepOptions& options) {
      world.recorder().clear();
      world.recorder().start();
      ours.step(options);
      world.recorder().stop();
      std::vector<Collective> found;
      for (const auto& one : world.recorder().collectives())
        if (one.kind == CollectiveKind::all_reduce) found.push_back(one);
      return found;
    };
    const std::vector<Collective> one(GetParam().shard > 1 ? 1 : 0, {CollectiveKind::all_reduce, Axis::shard, 8});
    for (int step = 0; step < 4; ++step) {
      twins.backward(step);
      const StepOptions options{.clip = step == 1 ? 0.1 : 0.0, .clip_value = 0.1, .skip_non_finite = step == 3};
      const auto found = norms(options);
      EXPECT_EQ(found, step % 2 == 1 ? one : std::vector<Collective>{});
    }
  });
}

// Gradients kept in two bytes, masters in four: the update uses exactly what was kept.
TEST_P(OverShares, GradientsMayBeOfLowPrecision) {
  for (const auto type : {at::kBFloat16, at::kHalf})
    on_ranks([&](World& world) {
      SmallNet net(at::kFloat);
      const Division division = GetParam();
      Engine engine =
          shard(world.mesh({.replicate = ranks / division.shard, .shard = division.shard}), net,
                Twins::with({.precision = {.parameters = type, .gradients = type, .scaled_loss = true}}, division));
      Sgd ours(engine, {.lr = 0.125});
      for (int step = 0; step < 2; ++step) {
        engine.backward(small_loss(net, step, world.rank() * 2, 2));
        std::vector<at::Tensor> expected;
        for (const auto& flat : engine.flats())
          for (const auto& share : flat->trained()) {
            EXPECT_EQ(share.gradient.scalar_type(), type);
            EXPECT_EQ(share.master.scalar_type(), at::kFloat);
            expected.push_back(share.master - share.gradient.to(at::kFloat) * 0.125);
          }
        // A limit that the gradients' type cannot hold is none.
        ours.step({.clip_value = 1e6});
        std::size_t at = 0;
        for (const auto& flat : engine.flats())
          for (const auto& share : flat->trained()) {
            EXPECT_TRUE(share.master.equal(expected[at++]));
            EXPECT_TRUE(share.low_precision().equal(share.master.to(type)));
          }
      }
    });
}

// On a CPU there is nowhere to go: the same numbers come out.
TEST_P(OverShares, OffloadChangesNoNumber) {
  on_ranks([&](World& world) {
    for (const auto offload : {Offload::optimizer, Offload::parameters}) {
      // Where a rank holds the whole of what it updates only a share of, the parameters stay on the device.
      if (offload == Offload::parameters && GetParam().shard > 1 && GetParam().what != Sharded::parameters) continue;
      Twins twins(world, GetParam(), {.offload = offload});
      const auto ours = kinds()[2].ours(twins.engine);
      const auto theirs = kinds()[2].theirs(twins.theirs->parameters());
      for (int step = 0; step < 3; ++step) {
        twins.backward(step);
        ours->step();
        theirs->step();
      }
      twins.expect_equal();
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Divided, OverShares, ::testing::ValuesIn(divisions()), name_of_division);

}  // namespace
}  // namespace bonfire::shares_test
