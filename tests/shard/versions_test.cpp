#include <deque>
#include <functional>
#include <string>

#include "bonfire/base/error.h"
#include "tests/shard/twins.h"
#include "tests/support/thrown.h"

// Several versions of the parameters at once: a backward has the values that its forward had, whatever came between.
namespace bonfire::versions_test {
namespace {

using testing::Chain;
using testing::Sharding;
using testing::Twins;

std::vector<Sharding> shardings() {
  auto all = testing::shardings();
  // Only one version can be kept in parts of its own.
  std::erase_if(all, [](const Sharding& sharding) { return sharding.reshard.ranks > 1; });
  return all;
}

Chain chain() { return Chain(3); }
Chain frozen_chain() {
  auto net = chain();
  for (auto& parameter : net->blocks[1]->parameters()) parameter.requires_grad_(false);
  net->blocks[2]->gain.requires_grad_(false);
  return net;
}
at::Tensor loss(Chain& net, int rank, int step) {
  return net->forward(testing::chain_input(rank, step), {0, 1, 2}).pow(2).mean();
}

// A net on plain torch with the values that another has now.
Chain copy_of(Chain& net) {
  auto copy = chain();
  const at::NoGradGuard no_grad;
  const auto from = net->parameters();
  const auto to = copy->parameters();
  for (std::size_t at = 0; at < to.size(); ++at) {
    to[at].copy_(from[at]);
    to[at].requires_grad_(from[at].requires_grad());
  }
  return copy;
}

struct Delayed {
  Delayed(const World& world, const Sharding& sharding, const std::function<Chain()>& make, ShardOptions options)
      : twins(world, sharding, make, std::move(options)) {}

  void forward(int step) {
    losses.push_back(loss(twins.ours, twins.rank, step));
    copies.push_back({copy_of(twins.theirs), step});
  }
  // Of the forward that waits longest; its gradients come to theirs.
  void backward(bool last = true) {
    last ? twins.engine.backward(losses.front()) : twins.engine.accumulate(losses.front());
    losses.pop_front();
    auto [net, step] = copies.front();
    copies.pop_front();
    for (int rank = 0; rank < twins.size; ++rank) (loss(net, rank, step) / twins.size).backward();
    const auto from = net->parameters();
    const auto to = twins.theirs->parameters();
    for (std::size_t at = 0; at < to.size(); ++at)
      if (from[at].grad().defined())
        to[at].mutable_grad() = to[at].grad().defined() ? to[at].grad() + from[at].grad() : from[at].grad();
  }

  Twins<Chain> twins;
  std::deque<at::Tensor> losses;
  std::deque<std::pair<Chain, int>> copies;
};

// A forward, the backward of the forward some steps ago, an update: as the stages of an asynchronous pipeline do.
void train_late(Delayed& net, int late, int steps = 7) {
  for (int step = 0; step < steps; ++step) {
    net.forward(step);
    if (step < late) continue;
    net.backward();
    net.twins.update();
  }
}

TEST(Versions, ABackwardHasTheValuesOfItsForward) {
  testing::run_ranks(testing::sharding_ranks, [](World& world) {
    for (const Sharding& sharding : shardings())
      for (const int late : {0, 1, 2}) {
        SCOPED_TRACE(fmt::format("{}, {} updates late", sharding.name(), late));
        Delayed net(world, sharding, chain, {.versions = late + 1});
        train_late(net, late);
        net.twins.expect_equal();
      }
  });
}

// The order that ranks have learned is that of a forward and a late backward. At the end only backwards come.
TEST(Versions, AreThoseOfTheForwardAlsoWhenNoOtherForwardComes) {
  testing::run_ranks(testing::sharding_ranks, [](World& world) {
    for (const Sharding& sharding : shardings())
      for (const int late : {1, 2}) {
        SCOPED_TRACE(fmt::format("{}, {} updates late", sharding.name(), late));
        Delayed net(world, sharding, chain, {.versions = late + 1, .log = Log::silent()});
        train_late(net, late);
        while (!net.losses.empty()) {
          net.backward();
          net.twins.update();
        }
        net.twins.expect_equal();
      }
  });
}

// One rank runs a forward that the others do not.
TEST(Versions, ComeForARankThatHasOthersForAnother) {
  testing::run_ranks(2, [](World& world) {
    Delayed net(world, {2, Sharded::parameters}, chain, {.versions = 2, .negotiate_order = true, .log = Log::silent()});
    net.forward(0);
    net.forward(1);
    net.backward();
    net.twins.update();
    at::Tensor unused;
    if (world.rank() == 0) unused = loss(net.twins.ours, 0, 2);
    net.backward();
    net.twins.update();
    net.twins.expect_equal();
  });
}

// Parameters that move to another buffer have only their newest values there.
TEST(Versions, OfABufferThatIsMadeAnewAreGone) {
  testing::run_ranks(testing::sharding_ranks, [](World& world) {
    for (const Sharding& sharding : shardings()) {
      if (sharding.what != Sharded::parameters) continue;
      SCOPED_TRACE(sharding.name());
      Delayed net(world, sharding, frozen_chain, {.versions = 2, .log = Log::silent()});
      net.forward(0);
      net.forward(1);
      net.backward();
      net.twins.update();
      net.twins.ours->blocks[2]->gain.requires_grad_(true);
      net.forward(2);
      EXPECT_NE(testing::thrown<Error>([&] {
                  net.twins.engine.backward(net.losses.front());
                }).find("comes after its parameters have changed"),
                std::string::npos);
    }
  });
}

// What is loaded replaces the newest version.
TEST(Versions, OlderOnesOutliveNewStateInTheNewest) {
  testing::run_ranks(testing::sharding_ranks, [](World& world) {
    for (const Sharding& sharding : shardings()) {
      SCOPED_TRACE(sharding.name());
      Delayed net(world, sharding, chain, {.versions = 2, .log = Log::silent()});
      net.forward(0);
      net.forward(1);
      net.backward();
      net.twins.update();
      for (const auto& slice : net.twins.engine.slices()) slice.write(0, slice.read());
      net.twins.engine.slices_written();
      net.backward();
      net.twins.update();
      net.twins.expect_equal();
    }
  });
}

// A scope in which parameters are read has the newest values, also while older ones are gathered ahead.
TEST(Versions, WholeParametersAreTheNewest) {
  testing::run_ranks(testing::sharding_ranks, [](World& world) {
    for (const Sharding& sharding : shardings()) {
      SCOPED_TRACE(sharding.name());
      Delayed net(world, sharding, chain, {.versions = 2, .log = Log::silent()});
      train_late(net, 1, 4);
      net.forward(4);
      net.twins.expect_equal();
      net.backward();
      net.twins.update();
      net.twins.expect_equal();
    }
  });
}

TEST(Versions, BesideWhatIsFrozen) {
  testing::run_ranks(testing::sharding_ranks, [](World& world) {
    for (const Sharding& sharding : shardings()) {
      SCOPED_TRACE(sharding.name());
      Delayed net(world, sharding, frozen_chain, {.versions = 2});
      train_late(net, 1);
      net.twins.expect_equal();
    }
  });
}

TEST(Versions, OfRoundedValues) {
  testing::run_ranks(testing::sharding_ranks, [](World& world) {
    for (const Sharding& sharding : shardings()) {
      SCOPED_TRACE(sharding.name());
      Delayed net(world, sharding, chain, {.precision = {.parameters = at::kFloat}, .versions = 2});
      train_late(net, 1);
      net.twins.expect_equal(1e-5);
    }
  });
}

// Graphs of two versions, alive at the same time, whose gradients are summed.
TEST(Versions, TwoAreAliveAtOnce) {
  testing::run_ranks(testing::sharding_ranks, [](World& world) {
    for (const Sharding& sharding : shardings()) {
      SCOPED_TRACE(sharding.name());
      Delayed net(world, sharding, chain, {.versions = 2});
      for (int round = 0; round < 3; ++round) {
        net.forward(3 * round);
        net.backward();
        net.forward(3 * round + 1);
        net.twins.update();
        net.forward(3 * round + 2);
        net.backward(/*last=*/false);
        net.backward();
        net.twins.update();
      }
      net.twins.expect_equal();
    }
  });
}

std::string message(const std::function<void()>& body) { return testing::thrown<Error>(body); }

TEST(Versions, WhatIsNoLongerKeptIsRefused) {
  testing::run_ranks(testing::sharding_ranks, [](World& world) {
    for (const Sharding& sharding : shardings()) {
      SCOPED_TRACE(sharding.name());
      Delayed net(world, sharding, chain, {.versions = 2});
      net.forward(0);
      net.forward(1);
      net.backward();
      net.twins.update();
      net.forward(2);
      net.twins.engine.backward(net.losses.back());
      net.twins.optimizer.step();
      EXPECT_NE(
          message([&] { net.twins.engine.backward(net.losses.front()); }).find("comes after its parameters have changed"),
          std::string::npos);
    }
  });
}

// What an update changes lies apart from what forward has read, so autograd need not know; other changes are its business.
TEST(Versions, AutogradCountsOnlyChangesInPlace) {
  testing::run_ranks(1, [](World& world) {
    for (const int versions : {1, 2}) {
      Delayed net(world, {}, chain, {.versions = versions});
      auto& flat = *net.twins.engine.flats().front();
      EXPECT_EQ(flat.trained().front().copy.defined(), versions > 1);
      net.forward(0);
      net.backward();
      const auto counted = flat.parameters().front()._version();
      const auto generation = flat.generation();
      net.twins.update();
      EXPECT_EQ(flat.parameters().front()._version() - counted, versions > 1 ? 0u : 1u);
      EXPECT_EQ(flat.generation(), generation + 1);
      EXPECT_EQ(flat.keeps(generation), versions > 1);
      if (versions == 1) continue;
      net.forward(1);
      {
        const auto whole = net.twins.engine.full_parameters(/*write=*/true);
        const at::NoGradGuard no_grad;
        auto first = flat.parameters().front();
        first.mul_(2);
      }
      EXPECT_GT(flat.parameters().front()._version(), counted);
      EXPECT_NE(
          message([&] { net.twins.engine.backward(net.losses.front()); }).find("comes after its parameters have changed"),
          std::string::npos);
    }
  });
}

TEST(Versions, WhatCannotBeIsRefused) {
  testing::run_ranks(2, [](World& world) {
    const auto with = [&](ShardOptions options) {
      return message([&] {
        auto net = chain();
        options.what = Sharded::parameters;
        shard(world.mesh({.shard = 2}), net, options);
      });
    };
    EXPECT_NE(with({.versions = 0}).find("versions is 0; allowed: 1 or more"), std::string::npos);
    EXPECT_NE(with({.reshard_after_forward = 2, .versions = 2}).find("versions = 2 with reshard_after_forward = 2"),
              std::string::npos);
    // An update where somebody reads what it changes.
    Delayed net(world, {}, chain, {.versions = 2});
    net.forward(0);
    net.backward();
    const auto whole = net.twins.engine.full_parameters();
    EXPECT_NE(message([&] { net.twins.optimizer.step(); }).find("while it is in use"), std::string::npos);
  });
}

// And is as if it had not been tried.
TEST(Versions, AnUpdateThatIsRefusedIsNoStep) {
  testing::run_ranks(1, [](World& world) {
    auto net = chain();
    Engine engine = shard(world.mesh({}), net, {.versions = 2, .log = Log::silent()});
    AdamW optimizer(engine, {.lr = 0.1});
    engine.backward(loss(net, 0, 0));
    {
      const auto whole = engine.full_parameters();
      EXPECT_ANY_THROW(optimizer.step());
    }
    optimizer.step();
    EXPECT_EQ(optimizer.steps(), 1);
  });
}

}  // namespace
}  // namespace bonfire::versions_test
