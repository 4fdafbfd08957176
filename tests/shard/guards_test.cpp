// What would go wrong silently is refused instead, in one line that names it.
#include <functional>

#include "bonfire/base/error.h"
#include "bonfire/nn/sequential.h"
#include "tests/shard/mistakes.h"
#include "tests/shard/plain.h"

namespace bonfire::guards_test {
namespace {

using testing::Block;
using testing::Chain;
using testing::chain_input;
using testing::expect_words;
using testing::gathering_shardings;
using testing::initialise;
using testing::loss_of;
using testing::message_of;
using testing::numbers;
using testing::run_ranks;
using testing::shard_chain;
using testing::Sharding;
using testing::shardings;
using torch::nn::Linear;

TEST(Guards, WeightsMayNotChangeBetweenForwardAndBackward) {
  run_ranks(testing::sharding_ranks, [](World& world) {
    for (const Sharding& sharding : shardings())
      for (const bool by_optimizer : {true, false}) {
        Chain net(3);
        Engine engine = shard_chain(world, sharding, net);
        Sgd optimizer(engine, {.lr = 0.1});
        engine.backward(loss_of(net));
        if (!by_optimizer) engine.spend_gradients();
        const auto late = loss_of(net);
        if (by_optimizer) {
          optimizer.step();
        } else {
          const auto whole = engine.full_parameters(/*write=*/true);
        }
        const auto message = message_of([&] { engine.backward(late); });
        if (engine.factors().parameters > 1)
          expect_words(message, {"backward of Unit 'root' comes after its parameters have changed"});
        else
          expect_words(message.substr(0, message.find('\n')), {"modified by an inplace operation"});
        engine.spend_gradients();
        engine.backward(loss_of(net));
        optimizer.step();
      }
  });
}

// Two graphs alive at once are no error while the weights stay.
TEST(Guards, WeightsThatStayMayGoBackwardLate) {
  run_ranks(testing::sharding_ranks, [](World& world) {
    for (const Sharding& sharding : gathering_shardings()) {
      Chain net(3);
      Engine engine = shard_chain(world, sharding, net, {.log = Log::silent()});
      const auto early = loss_of(net);
      engine.accumulate(loss_of(net));
      engine.backward(early);
    }
  });
}

TEST(Guards, ParametersKeepTheirShapeTypeAndMemory) {
  const std::vector<std::function<void(at::Tensor&)>> changes{[](at::Tensor& weight) {
                                                                weight.set_data(at::zeros({2, 6}, at::kDouble));
                                                              },
                                                              [](at::Tensor& weight) {
                                                                weight.set_data(at::zeros({6, 6}, at::kFloat));
                                                              },
                                                              [](at::Tensor& weight) {
                                                                weight.set_data(at::zeros({6, 6}, at::kDouble));
                                                              }};
  run_ranks(testing::sharding_ranks, [&](World& world) {
    for (const Sharding& sharding : shardings())
      for (const auto& change : changes) {
        Chain net(3);
        Engine engine = shard_chain(world, sharding, net);
        engine.backward(loss_of(net));
        engine.spend_gradients();
        change(net->blocks[1]->linear->weight);
        expect_words(message_of([&] {
                       // Where nothing tells when a Unit runs, it is noticed at the latest in backward.
                       const bool gathers = engine.factors().parameters > 1;
                       engine.backward(gathers ? loss_of(net) : net->head->weight.sum());
                     }),
                     {"parameter 'block1.linear.weight' was given another shape, dtype or memory after shard()", "to()",
                      "was Double [6, 6] on cpu"});
      }
  });
}

// Hands out a parameter.
struct LeakImpl : torch::nn::Module {
  LeakImpl() : linear(register_module("linear", Linear(6, 6))) {}
  at::Tensor forward(const at::Tensor& x) { return x.defined() ? linear->weight : x; }
  Linear linear;
};
BONFIRE_UNIT(Leak);

struct LeakyImpl : torch::nn::Module {
  LeakyImpl() : leak(register_module("leak", Leak())), block(register_module("block", Block(6))) { initialise(*this); }
  at::Tensor forward(const at::Tensor& x) { return block->forward(leak->forward(x)); }
  Leak leak;
  Block block;
};
BONFIRE_UNIT(Leaky);

TEST(Guards, DebugFindsParametersWhoseMemoryIsOut) {
  run_ranks(2, [](World& world) {
    Leaky net;
    Engine engine = shard(world.mesh({.shard = 2}), net, {.what = Sharded::parameters, .prefetch = 0, .debug = true});
    for (int step = 0; step < 3; ++step)
      expect_words(message_of([&] {
                     net->forward(numbers({6, 6}, 1));
                   }),
                   {"a tensor that goes into Unit 'leak' or comes out of it lies in parameter 'leak.linear.weight'",
                    "whose memory is freed"});
    // Where the memory is in, nothing is wrong with it.
    const auto whole = engine.full_parameters();
    net->forward(numbers({6, 6}, 1));
  });
}

TEST(Guards, OneBackwardCompletesAStepWhereGradientsAreKeptWhole) {
  run_ranks(2, [](World& world) {
    Chain net(3);
    Engine engine = shard_chain(world, {2, Sharded::optimizer}, net);
    engine.backward(loss_of(net));
    expect_words(
        message_of([&] { engine.backward(loss_of(net)); }),
        {"a second Engine::backward before the gradients of the first were used", "optimizer", "Engine::accumulate"});
    engine.spend_gradients();
  });
}

TEST(Guards, BackwardGoesThroughTheEngine) {
  run_ranks(2, [](World& world) {
    Chain net(3);
    Engine engine = shard_chain(world, {2, Sharded::parameters}, net);
    expect_words(message_of([&] { loss_of(net).backward(); }), {"call engine.backward(loss) instead of loss.backward()"});
  });
}

// When a Unit's backward has ended its gradients are on their way. One that comes later would be lost.
TEST(Guards, GradientsFromOutsideAUnitAreNamed) {
  run_ranks(2, [](World& world) {
    Chain net(3);
    Engine engine = shard_chain(world, {2, Sharded::parameters}, net);
    const auto whole = engine.full_parameters();
    const auto x = numbers({3, 6}, 1).set_requires_grad(true);
    const auto outside = (x * net->blocks[2]->gain).sum();  // made first, so autograd goes back through it last
    expect_words(message_of([&] {
                   engine.backward(net->forward(x, {0, 1, 2}).sum() + outside);
                 }),
                 {"the gradient of 'block2.gain' came after the backward of its Unit had ended"});
  });
}

TEST(BadInput, IsRefusedInOneLine) {
  const auto refused = [](int ranks, const std::function<void(World&)>& body, const std::vector<std::string>& words) {
    std::string message;
    run_ranks(ranks, [&](World& world) {
      const auto mine = message_of([&] { body(world); });
      if (world.rank() == 0) message = mine;
    });
    expect_words(message, words);
  };
  const auto with = [](int factor, ShardOptions options) {
    return [=](World& world) {
      Chain net(3);
      shard(world.mesh({.replicate = world.size() / factor, .shard = factor}), net, options);
    };
  };
  refused(4, [](World& world) { world.mesh({.shard = 3}); },
          {"mesh 1 x 1 x 3 x 1 x 1 (pipeline, replicate, shard, context, tensor) has 3 ranks, but the world has 4"});
  refused(2, with(2, {.what = Sharded::none}),
          {"sharding factor 2 with nothing sharded", "optimizer | gradients | parameters"});
  for (const char* const key : {"parameters", "gradients", "reduction", "outputs", "buffers"}) {
    ShardOptions options{.what = Sharded::parameters};
    auto& precision = options.precision;
    const std::string name = key;
    (name == "parameters"  ? precision.parameters
     : name == "gradients" ? precision.gradients
     : name == "reduction" ? precision.reduction
     : name == "outputs"   ? precision.outputs
                           : precision.buffers) = at::kInt;
    refused(1, with(1, options), {"precision." + name + " is Int", "fp32"});
  }
  refused(1, with(1, {.precision = {.parameters = at::kHalf}}), {"is trained in fp16", "scaled_loss"});
  refused(1,
          [](World& world) {
            Chain net(2);
            net->to(at::kHalf);
            shard(world.mesh({}), net);
          },
          {"is trained in fp16", "scaled_loss"});
  refused(1, with(1, {.prefetch = -1}), {"prefetch is -1", "0 or more"});
  refused(2, with(2, {.what = Sharded::parameters, .reshard_after_forward = 3}), {"reshard_after_forward = 3", "2"});
  refused(2, with(2, {.what = Sharded::parameters, .reshard_after_forward = -2}), {"reshard_after_forward = -2", "2"});
  refused(2, with(2, {.what = Sharded::parameters, .reduction = {.compression = plan::Compression::powersgd}}),
          {"PowerSGD with a sharding factor of 2", "allowed: a factor of 1"});
  refused(2, with(2, {.what = Sharded::optimizer, .offload = Offload::parameters}), {"offload of parameters", "optimizer"});
  refused(2,
          [](World& world) {
            testing::Plain net;
            shard(world.mesh({.shard = 2}), net, {.what = Sharded::parameters});
          },
          {"the root (Plain) is not a Unit", "BONFIRE_UNIT"});
  refused(1,
          [](World& world) {
            testing::Plain net;
            shard(world.mesh({}), net, {.precision = {.outputs = at::kDouble}});
          },
          {"the root (Plain) is not a Unit", "BONFIRE_UNIT"});
  refused(2,
          [](World& world) {
            struct Elsewhere : torch::nn::Module {
              at::Tensor weight = register_parameter("weight", at::empty({6}, at::Device(at::kMeta)));
            } net;
            shard(world.mesh({.replicate = 2}), net);
          },
          {"parameter 'weight' is on meta, but this rank computes on cpu", "model->to(world.device()) before shard()"});
  refused(2, with(1, {.precision = {.gradients = at::kBFloat16, .reduction = at::kFloat}}),
          {"precision.reduction is Float for gradients kept in BFloat16 on 2 replicas", "fewer bytes"});
  refused(2,
          with(2, {.what = Sharded::parameters,
                   .placement =
                       [](const std::string&, const at::Tensor&) {
                         return plan::Placement{.shape = {4, 4}, .boxes = {Box{{0, 0}, {4, 5}}}};
                       }}),
          {"placement of parameter '", "[0, 0] to [4, 5] of a tensor of shape [4, 4]", "has the parameter's shape"});
  refused(2,
          [](World& world) {
            UnitSequential inner(Block(6)), net;
            net->push_back(inner);
            shard(world.mesh({.shard = 2}), net, {.what = Sharded::parameters, .wrapping = {.ignored_modules = {"0"}}});
          },
          {"Unit '0.0' (Block) lies inside the ignored module '0'"});
  refused(2,
          [](World& world) {
            Chain net(3);
            shard(world.mesh({.tensor = 2}), net);
          },
          {"a tensor axis of 2 ranks, but no placement"});
}

}  // namespace
}  // namespace bonfire::guards_test
