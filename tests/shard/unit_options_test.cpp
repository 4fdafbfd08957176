#include <algorithm>
#include <vector>

#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include "bonfire/base/error.h"
#include "bonfire/comm/recorder.h"
#include "bonfire/optim/optimizer.h"
#include "bonfire/shard/engine.h"
#include "tests/support/ranks.h"
#include "tests/support/small_net.h"
#include "tests/support/thrown.h"

// What one Unit has for itself, and what backward may begin with.
namespace bonfire::unit_options_test {
namespace {

using testing::run_ranks;
using testing::SmallNet;

constexpr double rate = 0.1;

at::Tensor input_of(int step) { return at::arange(20, at::kDouble).add(step).sin().view({4, 5}); }

UnitOptions narrow_second(const std::string& path, torch::nn::Module&) {
  return {.parameters = path == "second" ? std::optional(at::kFloat) : std::nullopt};
}

// One Unit is computed in fp32 between others in fp64, which do not notice.
TEST(UnitOptions, AUnitComputesInATypeOfItsOwn) {
  for (const auto what : {Sharded::none, Sharded::optimizer, Sharded::parameters}) {
    SCOPED_TRACE(plan::name_of(what));
    run_ranks(2, [&](World& world) {
      SmallNet ours, theirs;
      const MeshShape shape = what == Sharded::none ? MeshShape{.replicate = 2} : MeshShape{.shard = 2};
      Engine engine = shard(world.mesh(shape), ours, {.what = what, .unit = narrow_second, .log = Log::silent()});
      EXPECT_EQ(ours->second->gain.scalar_type(), at::kFloat);
      EXPECT_EQ(ours->first->gain.scalar_type(), at::kDouble);
      Sgd optimizer(engine, {.lr = rate});
      for (int step = 0; step < 3; ++step) {
        const auto out = ours->forward(input_of(step));
        EXPECT_EQ(out.scalar_type(), at::kDouble);
        engine.backward(out.pow(2).mean());
        optimizer.step();

        const auto middle = theirs->first->forward(input_of(step)).to(at::kFloat);
        const auto& linear = theirs->second->linear;
        const auto narrow = (at::linear(middle, linear->weight.to(at::kFloat), linear->bias.to(at::kFloat)).tanh() *
                             theirs->second->gain.to(at::kFloat))
                                .to(at::kDouble);
        theirs->head->forward(narrow).pow(2).mean().backward();
        const at::NoGradGuard no_grad;
        for (auto& parameter : theirs->parameters()) {
          parameter.sub_(parameter.grad() * rate);
          parameter.mutable_grad().reset();
        }
      }
      // Masters: what is saved.
      const auto expected = theirs->named_parameters();
      for (const auto& slice : engine.slices()) {
        if (is_hint(slice.kind)) continue;
        const auto mine = slice.read();
        EXPECT_EQ(mine.scalar_type(), at::kDouble) << slice.name;
        const auto whole = expected[slice.name].detach().reshape({-1});
        EXPECT_LT((mine - whole.narrow(0, slice.begin, slice.length)).abs().max().item<double>(), 1e-12) << slice.name;
      }
    });
  }
}

std::int64_t gathers(const World& world, const std::optional<bool>& all, const std::optional<bool>& first) {
  SmallNet net;
  ShardOptions options{.what = Sharded::parameters, .log = Log::silent()};
  if (all) options.reshard_after_forward = *all;
  options.unit = [&](const std::string& path, torch::nn::Module&) {
    return UnitOptions{.reshard_after_forward = path == "first" ? first : std::nullopt};
  };
  Engine engine = shard(world.mesh({.shard = 2}), net, options);
  Sgd optimizer(engine, {.lr = rate});
  for (int step = 0; step < 2; ++step) {
    if (step == 1) {
      world.recorder().clear();
      world.recorder().start();
    }
    engine.backward(testing::small_loss(net, step));
    optimizer.step();
  }
  world.recorder().stop();
  const auto list = world.recorder().collectives();
  return std::count_if(list.begin(), list.end(),
                       [](const Collective& one) { return one.kind == CollectiveKind::all_gather; });
}

TEST(UnitOptions, AUnitStaysBetweenForwardAndBackwardOrDoesNot) {
  run_ranks(2, [](World& world) {
    const auto free = gathers(world, true, std::nullopt), keep = gathers(world, false, std::nullopt);
    // The other Unit is the last of forward, so it stays in any case.
    EXPECT_EQ(free, keep + 1);
    EXPECT_EQ(gathers(world, true, false), keep);
    EXPECT_EQ(gathers(world, false, true), free);
    EXPECT_EQ(gathers(world, true, true), free);
  });
}

TEST(UnitOptions, NumberFormatsOfUnitsAreChecked) {
  run_ranks(1, [](World& world) {
    SmallNet net;
    const auto said = testing::thrown<ConfigError>([&] {
      shard(world.mesh({}), net, {.unit = [](const std::string& path, torch::nn::Module&) {
              return UnitOptions{.parameters = path == "first" ? std::optional(at::kLong) : std::nullopt};
            }});
    });
    testing::expect_part(said, "Unit 'first' are to be Long");
  });
}

TEST(Backward, BeginsWithWhatIsNoNumberWhereItsGradientIsGiven) {
  for (const auto what : {Sharded::none, Sharded::parameters}) {
    SCOPED_TRACE(plan::name_of(what));
    run_ranks(2, [&](World& world) {
      SmallNet net;
      const MeshShape shape = what == Sharded::none ? MeshShape{.replicate = 2} : MeshShape{.shard = 2};
      Engine engine = shard(world.mesh(shape), net, {.what = what, .log = Log::silent()});
      const auto gradients = [&](bool root) {
        const auto out = net->forward(input_of(world.rank()));
        const auto weights = at::arange(out.numel(), at::kDouble).cos().view(out.sizes());
        if (root) {
          engine.accumulate(out, {.gradient = weights});
          engine.backward(net->forward(input_of(5)), {.gradient = weights});
        } else {
          engine.accumulate((out * weights).sum());
          engine.backward((net->forward(input_of(5)) * weights).sum());
        }
        std::vector<at::Tensor> list;
        for (const auto& flat : engine.flats())
          for (const auto& share : flat->trained()) list.push_back(share.gradient.clone());
        engine.spend_gradients();
        return list;
      };
      gradients(false);  // teaches the order
      const auto expected = gradients(false), got = gradients(true);
      ASSERT_EQ(got.size(), expected.size());
      for (std::size_t at = 0; at < got.size(); ++at) EXPECT_TRUE(got[at].equal(expected[at]));
      EXPECT_ANY_THROW(engine.backward(net->forward(input_of(0))));
    });
  }
}

}  // namespace
}  // namespace bonfire::unit_options_test
