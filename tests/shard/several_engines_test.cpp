#include <stdexcept>

#include "bonfire/base/error.h"
#include "tests/shard/twins.h"

// Engines whose modules build one graph together, as a generator and a discriminator do.
namespace bonfire::testing::several_engines_test {
namespace {

struct Two {
  Two(const World& world, const Sharding& first, const Sharding& second, ShardOptions options = {})
      : maker(
            world, first, [] { return Chain(2); }, options),
        judge(
            world, second, [] { return Chain(3); }, options) {}

  static at::Tensor loss(Chain& maker, Chain& judge, int rank, int step) {
    const auto made = maker->forward(chain_input(rank, step), {0, 1});
    return judge->forward(at::cat({made, made}, 1), {0, 1, 2}).pow(2).mean();
  }
  at::Tensor ours(int step) { return loss(maker.ours, judge.ours, maker.rank, step); }
  template <class Loss>
  void add(const Loss& loss) {
    for (int rank = 0; rank < maker.size; ++rank) (loss(maker.theirs, judge.theirs, rank) / maker.size).backward();
  }
  void add(int step) {
    add([&](Chain& maker, Chain& judge, int rank) { return loss(maker, judge, rank, step); });
  }
  void update() {
    maker.update();
    judge.update();
  }
  void expect_equal() {
    maker.expect_equal();
    judge.expect_equal();
  }

  Twins<Chain> maker, judge;
  std::vector<Engine*> both{&maker.engine, &judge.engine};
};

TEST(SeveralEngines, OneBackwardThroughAllOfThemIsTorchs) {
  run_ranks(sharding_ranks, [](World& world) {
    for (std::size_t at = 0; at < shardings().size(); ++at) {
      const Sharding& sharding = shardings()[at];
      SCOPED_TRACE(sharding.name());
      Two two(world, sharding, shardings()[(at + at / 4) % shardings().size()]);
      for (int step = 0; step < 4; ++step) {
        if (step == 2) {
          accumulate(two.both, two.ours(10));
          two.add(10);
        }
        backward(two.both, two.ours(step));
        two.add(step);
        two.update();
      }
      // Each of them alone again, and both the other way round.
      const auto judged = [](Chain& net, int rank) { return net->forward(chain_input(rank, 7), {0, 1, 2}).pow(2).mean(); };
      two.judge.step(judged);
      backward({&two.judge.engine, &two.maker.engine}, two.ours(8));
      two.add(8);
      two.update();
      two.expect_equal();
    }
  });
}

// What is not wanted of one is dropped, as the discriminator's gradients in a generator's step.
TEST(SeveralEngines, GradientsOfOneCanBeDropped) {
  run_ranks(sharding_ranks, [](World& world) {
    for (const Sharding& sharding : shardings()) {
      SCOPED_TRACE(sharding.name());
      Two two(world, sharding, sharding);
      for (int step = 0; step < 3; ++step) {
        backward({&two.maker.engine, &two.judge.engine}, two.ours(step));
        two.judge.engine.spend_gradients();
        two.maker.optimizer.step();
        two.add(step);
        two.maker.update_theirs();
        for (auto& parameter : two.judge.theirs->parameters()) parameter.mutable_grad().reset();
        two.judge.step([&](Chain& net, int rank) { return net->forward(chain_input(rank, step), {0, 1, 2}).pow(2).mean(); });
      }
      two.expect_equal();
    }
  });
}

// Reductions of both go over the same ranks. One of these has nothing to reduce of the second before its backward has ended.
TEST(SeveralEngines, ReductionsHaveOneOrderOnAllRanks) {
  run_ranks(sharding_ranks, [](World& world) {
    for (const Sharding& sharding :
         {Sharding{1, Sharded::none}, Sharding{2, Sharded::optimizer}, Sharding{2, Sharded::gradients}}) {
      SCOPED_TRACE(sharding.name());
      Two two(world, sharding, sharding);
      const auto loss = [](int step) {
        return [step](Chain& maker, Chain& judge, int rank) {
          return rank == 1 ? maker->forward(chain_input(rank, step), {0, 1}).pow(2).mean()
                           : Two::loss(maker, judge, rank, step);
        };
      };
      for (int step = 0; step < 3; ++step) {
        backward(two.both, loss(step)(two.maker.ours, two.judge.ours, world.rank()));
        two.add(loss(step));
        two.update();
      }
      two.expect_equal();
    }
  });
}

TEST(SeveralEngines, AFailureThatAllRanksShareLosesTheGradientsOfAll) {
  run_ranks(sharding_ranks, [](World& world) {
    for (const Sharding& sharding : shardings()) {
      SCOPED_TRACE(sharding.name());
      Two two(world, sharding, sharding);
      for (int step = 0; step < 3; ++step) {
        if (step == 1) {
          const auto made = two.maker.ours->forward(chain_input(world.rank(), 20), {0, 1});
          made.register_hook([](const at::Tensor&) { throw std::runtime_error("not this one"); });
          const auto loss = two.judge.ours->forward(at::cat({made, made}, 1), {0, 1, 2}).pow(2).mean();
          EXPECT_THROW(backward(two.both, loss), std::runtime_error);
          EXPECT_THROW(two.maker.optimizer.step(), Error);
          EXPECT_THROW(two.judge.optimizer.step(), Error);
        }
        backward(two.both, two.ours(step));
        two.add(step);
        two.update();
      }
      two.expect_equal();
    }
  });
}

TEST(SeveralEngines, WhatCannotBeIsRefused) {
  run_ranks(1, [](World& world) {
    const auto message = [](const auto& body) -> std::string {
      try {
        body();
      } catch (const Error& error) {
        return error.what();
      }
      return "";
    };
    Two two(world, {}, {});
    EXPECT_EQ(message([&] { backward({}, two.ours(0)); }), "backward() got no engines; pass every engine whose module ran");
    EXPECT_EQ(message([&] {
                backward({&two.maker.engine, &two.maker.engine}, two.ours(0));
              }),
              "a backward of several engines names one of them twice");
    Two uneven(world, {}, {}, {.uneven_inputs = true});
    EXPECT_NE(message([&] { backward(uneven.both, uneven.ours(0)); }).find("uneven_inputs"), std::string::npos);
    // One that is left out says so where its gradients come.
    EXPECT_NE(message([&] { two.maker.engine.backward(two.ours(0)); }).find("came outside of Engine::backward"),
              std::string::npos);
  });
}

}  // namespace
}  // namespace bonfire::testing::several_engines_test
