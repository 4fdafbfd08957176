// An update uses the gradients of one whole step, once. Anything else is an error, and changes nothing.
#include <chrono>
#include <stdexcept>

#include <torch/csrc/autograd/custom_function.h>

#include "bonfire/base/error.h"
#include "bonfire/comm/work.h"
#include "tests/shard/twins.h"
#include "tests/support/thrown.h"

namespace bonfire::complete_gradients_test {
namespace {

using testing::Block;
using testing::Chain;
using testing::chain_input;
using testing::expect_part;
using testing::initialise;
using testing::run_ranks;
using testing::Sharding;
using testing::shardings;

// The same numbers, and a backward that throws.
struct Throws : torch::autograd::Function<Throws> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) { return x.clone(); }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*, const torch::autograd::variable_list&) {
    throw std::runtime_error("no way back");
  }
};

struct MidwayImpl : torch::nn::Module {
  MidwayImpl()
      : first(register_module("first", Block(6))),
        second(register_module("second", Block(6))),
        third(register_module("third", Block(6))) {
    initialise(*this);
  }
  at::Tensor forward(const at::Tensor& x, bool throws) {
    auto y = second->forward(first->forward(x));
    return third->forward(throws ? Throws::apply(y) : y);
  }
  Block first, second, third;
};
BONFIRE_UNIT(Midway);

struct Trained {
  Trained(World& world, const Sharding& sharding)
      : engine(shard(world.mesh({.replicate = world.size() / sharding.factor, .shard = sharding.factor}), net,
                     sharding.options({.patience = std::chrono::milliseconds(20000), .log = Log::silent()}))),
        optimizer(engine, {.lr = 0.1, .weight_decay = 0.5}) {}

  at::Tensor loss(World& world, int step, bool throws = false) {
    return net->forward(chain_input(world.rank(), step), throws).pow(2).mean();
  }
  at::Tensor values() {
    const auto whole = engine.full_parameters();
    std::vector<at::Tensor> all;
    for (const auto& parameter : net->parameters()) all.push_back(parameter.detach().reshape({-1}).clone());
    return at::cat(all);
  }
  // The words of an update that is refused; nothing may have changed.
  std::string refused() {
    const auto before = values();
    std::string words = "nothing was thrown";
    try {
      optimizer.step({.clip = 1});
    } catch (const Error& error) {
      words = error.what();
    }
    EXPECT_TRUE(at::equal(before, values()));
    return words;
  }

  Midway net;
  Engine engine;
  Sgd optimizer;
};

TEST(CompleteGradients, AreWhatAnUpdateNeeds) {
  run_ranks(testing::sharding_ranks, [](World& world) {
    for (const Sharding& sharding : shardings()) {
      Trained trained(world, sharding);
      expect_part(trained.refused(), "before any backward");
      trained.engine.accumulate(trained.loss(world, 0));
      expect_part(trained.refused(), "some microbatches only");
      trained.engine.backward(trained.loss(world, 1));
      trained.optimizer.step();
      expect_part(trained.refused(), "a second update with the same gradients");
      EXPECT_EQ(trained.optimizer.steps(), 1);
    }
  });
}

// On all ranks at the same place: their gradients are lost, and the next step is as if nothing had been.
TEST(CompleteGradients, AreLostWhereBackwardThrows) {
  run_ranks(testing::sharding_ranks, [](World& world) {
    for (const Sharding& sharding : shardings())
      for (const int before : {0, 1}) {
        Trained trained(world, sharding), undisturbed(world, sharding);
        for (int step = 0; step < before; ++step)
          for (auto* each : {&trained, &undisturbed}) {
            each->engine.backward(each->loss(world, step));
            each->optimizer.step();
          }
        EXPECT_THROW(trained.engine.backward(trained.loss(world, 5, true)), std::exception);
        expect_part(trained.refused(), "a backward that threw");
        for (auto* each : {&trained, &undisturbed}) {
          each->engine.backward(each->loss(world, 6));
          each->optimizer.step();
        }
        trained.engine.check_equal();
        EXPECT_TRUE(at::equal(trained.values(), undisturbed.values())) << sharding.name();
      }
  });
}

// The others wait for a rank that has failed: they hear why, long before their patience with each other ends.
TEST(CompleteGradients, AFailureOfOneRankEndsTheStepOnAll) {
  for (const Sharding& sharding : shardings())
    for (const int before : {0, 2})
      run_ranks(testing::sharding_ranks, [&](World& world) {
        Trained trained(world, sharding);
        for (int step = 0; step < before; ++step) {
          trained.engine.backward(trained.loss(world, step));
          trained.optimizer.step();
        }
        std::string words = "nothing was thrown";
        try {
          trained.engine.backward(trained.loss(world, 9, world.rank() == 1));
        } catch (const std::exception& error) {
          words = error.what();
        }
        expect_part(words, world.rank() == 1 ? "no way back" : "rank 1 failed: no way back");
        EXPECT_THROW(trained.optimizer.step(), Error);
        // Their groups are not in step any more, and say so instead of waiting.
        EXPECT_THROW(world.group().barrier().wait(), PeerLost);
      });
}

}  // namespace
}  // namespace bonfire::complete_gradients_test
