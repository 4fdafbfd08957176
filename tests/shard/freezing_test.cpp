// Partial fine-tuning: what is frozen costs nothing but its share of the parameters, and that may change between steps.
#include <algorithm>
#include <map>
#include <numeric>
#include <utility>

#include "bonfire/comm/recorder.h"
#include "tests/shard/twins.h"

namespace bonfire::freezing_test {
namespace {

using testing::Chain;
using testing::chain_input;
using testing::run_ranks;
using testing::Sharding;
using testing::shardings;
using testing::Twins;

const testing::Order whole_chain{0, 1, 2, 3};

void freeze(Chain& net, const std::function<bool(const std::string&)>& frozen) {
  for (auto& item : net->named_parameters()) item.value().set_requires_grad(!frozen(item.key()));
}

bool ends(const std::string& name, const char* end) { return name.ends_with(end); }

// By step: which parameters are frozen in it. Whole Units, parts of them, the first ones, the root, and none.
const std::vector<std::function<bool(const std::string&)>>& phases() {
  static const std::vector<std::function<bool(const std::string&)>> all{
      [](const std::string&) { return false; },
      [](const std::string& name) { return ends(name, "weight"); },
      [](const std::string& name) { return name.starts_with("block0") || name.starts_with("block1"); },
      [](const std::string& name) { return name.starts_with("block2") || name.starts_with("head"); },
      [](const std::string& name) { return !ends(name, "bias"); },
      [](const std::string&) { return false; },
      [](const std::string& name) { return name.starts_with("block0"); }};
  return all;
}

TEST(Freezing, BetweenStepsTrainsAsTorchDoes) {
  run_ranks(testing::sharding_ranks, [](World& world) {
    std::vector<std::pair<Sharding, Offload>> ways;
    for (const Sharding& sharding : shardings()) {
      ways.emplace_back(sharding, Offload::none);
      if (sharding.factor == 1 || sharding.what == Sharded::parameters) ways.emplace_back(sharding, Offload::parameters);
    }
    for (const auto& [sharding, offload] : ways) {
      SCOPED_TRACE(fmt::format("{}{}", sharding.name(), offload == Offload::parameters ? ", on the host" : ""));
      Twins<Chain> twins(world, sharding, [] { return Chain(4); }, {.offload = offload, .log = Log::silent()});
      for (std::size_t phase = 0; phase < phases().size(); ++phase) {
        freeze(twins.ours, phases()[phase]);
        freeze(twins.theirs, phases()[phase]);
        for (int step = 0; step < 2; ++step)
          twins.step([&](Chain& net, int rank) {
            return net->forward(chain_input(rank, 10 * static_cast<int>(phase) + step), whole_chain).pow(2).mean();
          });
      }
      twins.expect_equal();
    }
  });
}

// Gradients that were accumulated move along. Thawed parameters start from nothing.
TEST(Freezing, BetweenMicrobatches) {
  run_ranks(testing::sharding_ranks, [](World& world) {
    for (const Sharding& sharding : shardings()) {
      Twins<Chain> twins(world, sharding, [] { return Chain(4); }, {.log = Log::silent()});
      const auto loss = [](int step) {
        return [step](Chain& net, int rank) { return net->forward(chain_input(rank, step), whole_chain).pow(2).mean(); };
      };
      for (int step = 0; step < 3; ++step) {
        freeze(twins.ours, phases()[1]);
        freeze(twins.theirs, phases()[1]);
        twins.accumulate(loss(10 * step));
        freeze(twins.ours, phases()[0]);
        freeze(twins.theirs, phases()[0]);
        twins.accumulate(loss(10 * step + 1));
        twins.step(loss(10 * step + 2));
      }
      twins.expect_equal();
    }
  });
}

struct Bytes {
  std::int64_t gradients = 0, masters = 0, state = 0, reduced = 0;
};

// Of a step with AdamW, the third one.
Bytes bytes_of(const World& world, const Sharding& sharding, const std::function<bool(const std::string&)>& frozen) {
  Chain net(4);
  net->to(at::kFloat);
  freeze(net, frozen);
  Engine engine = shard(world.mesh({.replicate = 4 / sharding.factor, .shard = sharding.factor}), net,
                        sharding.options({.precision = {.parameters = at::kBFloat16}, .log = Log::silent()}));
  AdamW optimizer(engine, {.lr = 0.01});
  Bytes bytes;
  for (int step = 0; step < 3; ++step) {
    world.recorder().clear();
    world.recorder().start();
    engine.backward(net->forward(chain_input(0, step).to(at::kBFloat16), whole_chain).pow(2).mean());
    world.recorder().stop();
    optimizer.step();
  }
  for (const auto& one : world.recorder().collectives())
    if (one.kind == CollectiveKind::reduce_scatter || one.kind == CollectiveKind::all_reduce) bytes.reduced += one.bytes;
  for (const auto& flat : engine.flats())
    for (const auto& share : flat->trained()) {
      bytes.masters += static_cast<std::int64_t>(share.master.nbytes());
      bytes.gradients += static_cast<std::int64_t>(flat->keeps_whole_gradients() ? flat->gradient(share.region).nbytes()
                                                                                 : share.gradient.nbytes());
    }
  bytes.state = optimizer.state_bytes();
  return bytes;
}

TEST(Freezing, CostsNoGradientsNoReductionAndNoState) {
  run_ranks(testing::sharding_ranks, [](World& world) {
    for (const Sharding& sharding : shardings()) {
      const auto nothing = bytes_of(world, sharding, [&](const std::string& name) { return name != "head.bias"; });
      const auto half = bytes_of(world, sharding, phases()[2]);
      const auto all = bytes_of(world, sharding, [](const std::string&) { return false; });
      // One region, padded to 64 elements for each of four ranks.
      const std::int64_t padded = 64 * 4;
      const auto gradients = sharding.what >= Sharded::gradients ? sharding.factor : 1;
      const auto optimizer = sharding.what >= Sharded::optimizer ? sharding.factor : 1;
      EXPECT_EQ(nothing.gradients, padded * 4 / gradients) << sharding.name();
      EXPECT_EQ(nothing.masters, padded * 4 / optimizer) << sharding.name();
      EXPECT_EQ(nothing.state, 2 * padded * 4 / optimizer) << sharding.name();
      EXPECT_LT(half.gradients, all.gradients) << sharding.name();
      EXPECT_LT(half.reduced, all.reduced) << sharding.name();
      EXPECT_GT(nothing.reduced, 0) << sharding.name();
      EXPECT_LT(nothing.reduced, half.reduced) << sharding.name();
    }
  });
}

// Where nothing before a Unit is trained, backward does not go there, and does not gather it; and it does again, once
// thawed.
TEST(Freezing, SavesTheGathersOfBackward) {
  run_ranks(testing::sharding_ranks, [](World& world) {
    Chain net(4);
    Engine engine = shard(world.mesh({.shard = 4}), net, {.what = Sharded::parameters, .log = Log::silent()});
    const auto gathers = [&] {
      engine.backward(net->forward(chain_input(0, 0), whole_chain).pow(2).mean());  // shows what is needed
      engine.spend_gradients();
      world.recorder().clear();
      world.recorder().start();
      engine.backward(net->forward(chain_input(0, 0), whole_chain).pow(2).mean());
      world.recorder().stop();
      engine.spend_gradients();
      const auto list = world.recorder().collectives();
      return std::count_if(list.begin(), list.end(), [](const auto& one) { return one.kind == CollectiveKind::all_gather; });
    };
    EXPECT_EQ(gathers(), 5 + 3);
    freeze(net, phases()[2]);
    EXPECT_EQ(gathers(), 5 + 1);
    freeze(net, phases()[0]);
    EXPECT_EQ(gathers(), 5 + 3);
  });
}

TEST(Freezing, EverythingLeavesNothingToReduce) {
  run_ranks(2, [](World& world) {
    Chain net(4);
    freeze(net, [](const std::string&) { return true; });
    Engine engine = shard(world.mesh({.shard = 2}), net, {.what = Sharded::parameters});
    const auto x = chain_input(0, 0).set_requires_grad(true);
    engine.backward(net->forward(x, whole_chain).sum());
    EXPECT_TRUE(x.grad().defined());
    for (const auto& flat : engine.flats()) EXPECT_TRUE(flat->trained().empty());
  });
}

// What was learned of the order is learned anew: pools hold what they would, had it always been so.
TEST(Freezing, LeavesPoolsAsSmallAsTheyWere) {
  constexpr std::size_t length = 10;
  testing::Order all(length);
  std::iota(all.begin(), all.end(), std::size_t{0});
  const auto blocks = [](const std::string& name) { return name.starts_with("block") && !name.starts_with("block0"); };
  const auto nothing = [](const std::string&) { return false; };
  run_ranks(2, [&](World& world) {
    for (const auto what : {Sharded::gradients, Sharded::parameters}) {
      const auto bytes = [&](const auto& frozen_first, const auto& frozen_then) {
        Chain net(length);
        freeze(net, frozen_first);
        Engine engine = shard(world.mesh({.shard = 2}), net, Sharding{2, what}.options({.log = Log::silent()}));
        for (int step = 0; step < 6; ++step) {
          if (step == 2) freeze(net, frozen_then);
          engine.backward(net->forward(chain_input(world.rank(), step), all).pow(2).mean());
          engine.spend_gradients();
        }
        return engine.pool_bytes();
      };
      const auto most = std::max(bytes(nothing, nothing), bytes(blocks, blocks));
      EXPECT_LE(bytes(blocks, nothing), most) << "thawed, " << plan::name_of(what);
      EXPECT_LE(bytes(nothing, blocks), most) << "frozen, " << plan::name_of(what);
    }
  });
}

// The user sees the module as it was: names, shapes and identity, in and out of memory.
TEST(Freezing, OriginalParametersStayVisible) {
  run_ranks(testing::sharding_ranks, [](World& world) {
    for (const Sharding& sharding : shardings()) {
      Chain net(4), original(4);
      std::map<std::string, at::Tensor> before;
      for (const auto& item : net->named_parameters()) before[item.key()] = item.value();
      Engine engine =
          shard(world.mesh({.replicate = 4 / sharding.factor, .shard = sharding.factor}), net, sharding.options());
      Sgd optimizer(engine,
                    {.lr = 0.1,
                     .weight_decay = 0.5,
                     .rules = {{[](const std::string& name, const at::Tensor&) { return ends(name, "gain"); }, 0, 0},
                               {[](const std::string&, const at::Tensor& weight) { return weight.dim() == 2; }, 0, 0}}});
      for (int step = 0; step < 2; ++step) {
        engine.backward(net->forward(chain_input(0, step), whole_chain).pow(2).mean());
        optimizer.step();
        for (const auto& item : net->named_parameters()) {
          EXPECT_TRUE(item.value().is_same(before.at(item.key())));
          EXPECT_EQ(item.value().sizes(), original->named_parameters()[item.key()].sizes());
          EXPECT_EQ(item.value().scalar_type(), at::kDouble);
          EXPECT_TRUE(item.value().is_leaf() && item.value().requires_grad());
        }
      }
      // What a rule gave a learning rate of zero has not moved, by name or by shape.
      const auto whole = engine.full_parameters();
      for (const auto& item : original->named_parameters())
        EXPECT_EQ(at::equal(item.value(), net->named_parameters()[item.key()]), !ends(item.key(), "bias"))
            << item.key() << ", " << sharding.name();
    }
  });
}

}  // namespace
}  // namespace bonfire::freezing_test
