// However a Unit is used, its gradients are those of plain torch.
#include <optional>
#include <stdexcept>
#include <tuple>

#include <torch/nn/modules/embedding.h>

#include "tests/shard/twins.h"

namespace bonfire::uses_test {
namespace {

using testing::Block;
using testing::Chain;
using testing::chain_input;
using testing::ChainImpl;
using testing::gathering_shardings;
using testing::initialise;
using testing::numbers;
using testing::run_ranks;
using testing::Sharding;
using testing::shardings;
using testing::Twins;
using torch::nn::Linear;

constexpr int steps = 3;
constexpr std::int64_t width = ChainImpl::width;

at::Tensor mean_square(const at::Tensor& x) { return x.pow(2).mean(); }

// `loss` gets a net, a rank and a step.
template <class Net, class Make, class Loss>
void train(const Make& make, const Loss& loss, const std::vector<Sharding>& where = shardings()) {
  run_ranks(testing::sharding_ranks, [&](World& world) {
    for (const Sharding& sharding : where) {
      Twins<Net> twins(world, sharding, make);
      for (int step = 0; step < steps; ++step) twins.step([&](Net& net, int rank) { return loss(net, rank, step); });
      twins.expect_equal();
    }
  });
}

TEST(Uses, SeveralInOneForward) {
  for (const auto& order : std::vector<testing::Order>{{0, 0, 1, 1, 1}, {0, 1, 0, 2, 1}, {2, 2}, {1}})
    train<Chain>([] { return Chain(4); },
                 [&](Chain& net, int rank, int step) { return mean_square(net->forward(chain_input(rank, step), order)); });
}

// A second backward through the same graph has as many uses to wait for as the first.
TEST(Uses, SeveralInARetainedGraph) {
  run_ranks(testing::sharding_ranks, [](World& world) {
    for (const Sharding& sharding : shardings())
      for (const auto& order : std::vector<testing::Order>{{0, 1, 2}, {0, 0}, {0, 1, 0, 1}}) {
        Twins<Chain> twins(world, sharding, [] { return Chain(3); });
        for (int step = 0; step < steps; ++step) {
          const auto loss = [&](Chain& net, int rank) { return mean_square(net->forward(chain_input(rank, step), order)); };
          const auto ours = loss(twins.ours, world.rank());
          twins.engine.accumulate(ours, {.retain_graph = true});
          twins.engine.accumulate(ours, {.retain_graph = true});
          twins.engine.backward(ours);
          for (int times = 0; times < 3; ++times) twins.add(loss);
          twins.update();
        }
        twins.expect_equal();
      }
  });
}

// Writes to what it was given, with and without its weights; the caller goes on with what it finds there.
struct WriterImpl : torch::nn::Module {
  WriterImpl() : linear(register_module("linear", Linear(width, width))) {
    gain = register_parameter("gain", at::ones({width}));
  }
  at::Tensor forward(at::Tensor x) {
    x.mul_(2);
    const auto y = linear->forward(x.clone());
    x.add_(gain);
    return y;
  }
  Linear linear;
  at::Tensor gain;
};
BONFIRE_UNIT(Writer);

struct WrittenImpl : torch::nn::Module {
  WrittenImpl()
      : first(register_module("first", Linear(width, width))),
        writer(register_module("writer", Writer())),
        last(register_module("last", Block(width))) {
    initialise(*this);
  }
  at::Tensor forward(const at::Tensor& x) {
    auto y = first->forward(x);
    const auto z = writer->forward(y);
    const auto between = y * 3;
    return last->forward(z) + between + writer->forward(y) + y.tanh();
  }
  Linear first;
  Writer writer;
  Block last;
};
BONFIRE_UNIT(Written);

TEST(Uses, InputsMayBeWrittenInPlace) {
  train<Written>([] { return Written(); },
                 [](Written& net, int rank, int step) { return mean_square(net->forward(chain_input(rank, step))); });
}

TEST(Uses, InputsThatAutogradCannotFollowAreRefused) {
  run_ranks(2, [](World& world) {
    Written net;
    const Engine engine = shard(world.mesh({.shard = 2}), net, {.what = Sharded::parameters, .log = Log::silent()});
    const auto leaf = chain_input(0, 0).set_requires_grad(true);
    for (const auto& input : {leaf, (leaf * 2).narrow(0, 1, 2)}) try {
        static_cast<void>(net->writer->forward(input));
        ADD_FAILURE() << "nothing was thrown";
      } catch (const std::exception& error) {
        EXPECT_NE(std::string(error.what()).find("Unit 'writer' writes in place to an input"), std::string::npos)
            << error.what();
      }
  });
}

// Keeps a second result where its caller finds it: a penalty on what its weights do.
struct PenalisedImpl : torch::nn::Module {
  PenalisedImpl() : linear(register_module("linear", Linear(width, width))) {}
  at::Tensor forward(const at::Tensor& x) {
    const auto y = linear->forward(x);
    penalty = linear->forward(y.tanh()).pow(2).mean();
    return y.sin();
  }
  Linear linear;
  at::Tensor penalty;
};
BONFIRE_UNIT(Penalised);

struct PenaltiesImpl : torch::nn::Module {
  PenaltiesImpl()
      : first(register_module("first", Penalised())),
        second(register_module("second", Penalised())),
        last(register_module("last", Block(width))) {
    initialise(*this);
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto y = last->forward(second->forward(first->forward(x)));
    return mean_square(y) + first->penalty * 0.1 + second->penalty;
  }
  Penalised first, second;
  Block last;
};
BONFIRE_UNIT(Penalties);

TEST(Uses, SideResultsCount) {
  train<Penalties>([] { return Penalties(); },
                   [](Penalties& net, int rank, int step) { return net->forward(chain_input(rank, step)); });
}

// Where backward comes to a Unit by its side result alone, nothing has gathered its weights.
TEST(Uses, SideResultsAloneAreRefused) {
  run_ranks(2, [](World& world) {
    Penalties net;
    Engine engine = shard(world.mesh({.shard = 2}), net, {.what = Sharded::parameters, .log = Log::silent()});
    for (int step = 0; step < 2; ++step) {
      static_cast<void>(net->forward(chain_input(world.rank(), step)));
      try {
        engine.backward(net->second->penalty);
        ADD_FAILURE() << "nothing was thrown";
      } catch (const std::exception& error) {
        const std::string words = error.what();
        EXPECT_TRUE(words.find("'second.linear") != std::string::npos && words.find("memory is freed") != std::string::npos)
            << words;
      }
    }
  });
}

TEST(Uses, SeveralForwardsBeforeOneBackward) {
  train<Chain>([] { return Chain(3); },
               [](Chain& net, int rank, int step) {
                 const auto first = net->forward(chain_input(rank, step), {0, 1, 2});
                 const auto second = net->forward(chain_input(rank, step + 50), {0, 1, 2});
                 return mean_square(first) + mean_square(second * first.detach());
               });
}

// One Unit inside another, both with parameters of their own that are read before and after the inner one runs.
struct OuterImpl : torch::nn::Module {
  OuterImpl()
      : before(register_module("before", Linear(width, width))),
        inner(register_module("inner", Block(width))),
        after(register_module("after", Linear(width, width))) {}
  at::Tensor forward(const at::Tensor& x) {
    return after->forward(inner->forward(before->forward(x).tanh()) + inner->forward(x)).tanh();
  }
  Linear before;
  Block inner;
  Linear after;
};
BONFIRE_UNIT(Outer);

struct NestedImpl : torch::nn::Module {
  NestedImpl()
      : first(register_module("first", Outer())),
        second(register_module("second", Outer())),
        scale(register_parameter("scale", at::ones({width}))) {
    initialise(*this);
  }
  at::Tensor forward(const at::Tensor& x) { return second->forward(first->forward(x * scale)) * scale; }
  Outer first, second;
  at::Tensor scale;
};
BONFIRE_UNIT(Nested);

TEST(Uses, OneUnitInsideAnother) {
  train<Nested>([] { return Nested(); },
                [](Nested& net, int rank, int step) { return mean_square(net->forward(chain_input(rank, step))); });
}

// Takes and gives several tensors; one result is not used by the loss, one input needs no gradient, one is not there.
struct ManyImpl : torch::nn::Module {
  ManyImpl() : a(register_module("a", Linear(width, width))), b(register_module("b", Linear(width, width))) {}
  std::tuple<at::Tensor, std::vector<at::Tensor>> forward(const at::Tensor& x, std::optional<at::Tensor> y,
                                                          std::pair<at::Tensor, int> constant) {
    auto z = a->forward(x).tanh() * constant.first * constant.second;
    if (y) z = z + b->forward(*y);
    return {z, {a->forward(z).sin(), x.detach(), b->forward(x)}};
  }
  Linear a, b;
};
BONFIRE_UNIT(Many);

struct ManyNetImpl : torch::nn::Module {
  ManyNetImpl() : first(register_module("first", Many())), second(register_module("second", Many())) { initialise(*this); }
  at::Tensor forward(const at::Tensor& x) {
    auto [y, more] = first->forward(x, std::nullopt, {at::full({}, 0.5, at::kDouble), 2});
    auto [z, rest] = second->forward(y, more[0], {x, 1});
    return z + rest[0] + more[1];
  }
  Many first, second;
};
BONFIRE_UNIT(ManyNet);

TEST(Uses, SeveralInputsAndOutputs) {
  train<ManyNet>([] { return ManyNet(); },
                 [](ManyNet& net, int rank, int step) { return mean_square(net->forward(chain_input(rank, step))); });
}

struct TokensImpl : torch::nn::Module {
  TokensImpl() : table(register_module("table", torch::nn::Embedding(11, width))) {}
  at::Tensor forward(const at::Tensor& tokens) { return table->forward(tokens); }
  torch::nn::Embedding table;
};
BONFIRE_UNIT(Tokens);

// The first Unit has no input that a gradient could flow to; in the second one, the first layer is frozen: its weight is
// needed after the last gradient of the Unit's parameters has come. `idle` is never used, and `still` wholly frozen.
struct OddImpl : torch::nn::Module {
  OddImpl()
      : tokens(register_module("tokens", Tokens())),
        mixed(register_module("mixed", Outer())),
        idle(register_module("idle", Block(width))),
        still(register_module("still", Block(width))),
        last(register_module("last", Block(width))) {
    initialise(*this);
    for (auto& parameter : mixed->before->parameters()) parameter.set_requires_grad(false);
    for (auto& parameter : still->parameters()) parameter.set_requires_grad(false);
  }
  at::Tensor forward(const at::Tensor& tokens_) {
    return last->forward(still->forward(mixed->forward(still->forward(tokens->forward(tokens_)))));
  }
  Tokens tokens;
  Outer mixed;
  Block idle, still, last;
};
BONFIRE_UNIT(Odd);

TEST(Uses, InputsWithoutGradientFrozenLayersAndUnusedUnits) {
  train<Odd>([] { return Odd(); },
             [](Odd& net, int rank, int step) {
               return mean_square(net->forward(at::arange(5).mul(3 + rank).add(step).remainder(11)));
             });
}

// A Unit writes to its input, and the caller to what it got.
struct InPlaceImpl : torch::nn::Module {
  InPlaceImpl() : a(register_module("a", Linear(width, width))), b(register_module("b", Linear(width, width))) {}
  at::Tensor forward(at::Tensor x) {
    x.mul_(2).sin_();
    auto y = a->forward(x);
    y.relu_();
    return b->forward(y).add_(x);
  }
  Linear a, b;
};
BONFIRE_UNIT(InPlace);

struct InPlaceNetImpl : torch::nn::Module {
  InPlaceNetImpl()
      : start(register_module("start", Linear(width, width))),
        first(register_module("first", InPlace())),
        second(register_module("second", InPlace())) {
    initialise(*this);
  }
  at::Tensor forward(const at::Tensor& x) {
    auto y = first->forward(start->forward(x));
    y.add_(1);
    return second->forward(y).mul_(0.5);
  }
  Linear start;
  InPlace first, second;
};
BONFIRE_UNIT(InPlaceNet);

TEST(Uses, ChangesInPlace) {
  train<InPlaceNet>([] { return InPlaceNet(); },
                    [](InPlaceNet& net, int rank, int step) { return mean_square(net->forward(chain_input(rank, step))); });
}

// What autograd has saved must not be changed, through a seam as little as without one.
TEST(Uses, ForbiddenChangesInPlaceAreStillNoticed) {
  run_ranks(2, [](World& world) {
    InPlaceNet net;
    Engine engine = shard(world.mesh({.shard = 2}), net, {.what = Sharded::parameters});
    const auto saved = net->first->forward(numbers({3, width}, 1)).exp();  // keeps its result
    EXPECT_THROW(engine.backward(net->second->forward(saved).sum()), std::exception);
    engine.backward(mean_square(net->forward(numbers({3, width}, 1))));
  });
}

TEST(Uses, ForwardsThatNobodyDifferentiates) {
  run_ranks(testing::sharding_ranks, [](World& world) {
    for (const Sharding& sharding : shardings()) {
      Twins<Chain> twins(world, sharding, [] { return Chain(4); });
      const auto evaluate = [&](int step) {
        const at::NoGradGuard no_grad;
        const auto x = chain_input(world.rank(), step);
        const auto mine = twins.ours->forward(x, {0, 1, 2, 3});
        EXPECT_LE((mine - twins.theirs->forward(x, {0, 1, 2, 3})).abs().max().item<double>(), 1e-12) << sharding.name();
        // Other Units than in training, and in another order.
        twins.ours->forward(x, {2, 0});
      };
      for (int step = 0; step < 5; ++step) {
        evaluate(step + 10);
        if (step == 2) twins.ours->forward(chain_input(0, 77), {0, 1, 2, 3});  // its graph is thrown away
        twins.step([&](Chain& net, int rank) {
          const auto y = net->forward(chain_input(rank, step), {0, 1, 2, 3});
          if (step > 2 && &net == &twins.ours) evaluate(step + 20);
          return mean_square(y);
        });
      }
      twins.expect_equal();
    }
  });
}

// What a forward between backward and update has gathered is older than the update.
TEST(Uses, ForwardsBeforeAnUpdateLeaveNothingBehind) {
  run_ranks(testing::sharding_ranks, [](World& world) {
    for (const Sharding& sharding : shardings()) {
      Twins<Chain> twins(world, sharding, [] { return Chain(4); });
      for (int step = 0; step < 4; ++step) {
        twins.backward([&](Chain& net, int rank) {
          return mean_square(net->forward(chain_input(rank, step), {0, 1, 2, 3}));
        });
        const auto unused = twins.ours->forward(chain_input(world.rank(), step), {0, 1, 2, 3});
        twins.update();
        twins.expect_equal();
      }
    }
  });
}

TEST(Uses, OneGraphMayGoBackwardTwice) {
  run_ranks(testing::sharding_ranks, [](World& world) {
    for (const Sharding& sharding : shardings()) {
      Twins<Chain> twins(world, sharding, [] { return Chain(4); });
      for (int step = 0; step < steps; ++step) {
        const auto outputs = twins.ours->forward(chain_input(world.rank(), step), {0, 1, 2, 3});
        twins.engine.accumulate(mean_square(outputs), {.retain_graph = true});
        twins.engine.backward(outputs.sin().sum());
        twins.add([&](Chain& net, int rank) {
          const auto y = net->forward(chain_input(rank, step), {0, 1, 2, 3});
          return mean_square(y) + y.sin().sum();
        });
        twins.update();
      }
      twins.expect_equal();
    }
  });
}

// Throws where it is asked to: in forward, or when its gradient comes.
struct FragileImpl : torch::nn::Module {
  FragileImpl() : linear(register_module("linear", Linear(width, width))) {}
  at::Tensor forward(const at::Tensor& x, const std::string& where) {
    if (where == "forward") throw std::runtime_error("fragile");
    auto y = linear->forward(x);
    if (where == "backward") y.register_hook([](const at::Tensor&) -> void { throw std::runtime_error("fragile"); });
    return y;
  }
  Linear linear;
};
BONFIRE_UNIT(Fragile);

struct FragileNetImpl : torch::nn::Module {
  FragileNetImpl() {
    for (int at = 0; at < 3; ++at) {
      blocks.push_back(register_module(fmt::format("block{}", at), Block(width)));
      fragile.push_back(register_module(fmt::format("fragile{}", at), Fragile()));
    }
    scale = register_parameter("scale", at::ones({width}));
    initialise(*this);
  }
  // `forgive`: the net itself catches, and goes on without the Unit that threw.
  at::Tensor forward(const at::Tensor& x, const std::string& where, bool forgive) {
    auto y = x;
    for (std::size_t at = 0; at < 3; ++at) {
      y = blocks[at]->forward(y);
      try {
        y = fragile[at]->forward(y, at == 1 ? where : "");
      } catch (const std::runtime_error&) {
        if (!forgive) throw;
      }
    }
    return y * scale;
  }
  std::vector<Block> blocks;
  std::vector<Fragile> fragile;
  at::Tensor scale;
};
BONFIRE_UNIT(FragileNet);

TEST(Uses, TrainingGoesOnAfterAnException) {
  run_ranks(testing::sharding_ranks, [](World& world) {
    for (const Sharding& sharding : shardings())
      for (const bool accumulate : {false, true}) {
        Twins<FragileNet> twins(world, sharding, [] { return FragileNet(); });
        for (int step = 0; step < 5; ++step) {
          const auto where = std::vector<std::string>{"forward", "backward"}[static_cast<std::size_t>(step % 2)];
          const auto input = chain_input(world.rank(), step + 30);
          EXPECT_THROW(
              {
                if (accumulate) twins.engine.accumulate(mean_square(twins.ours->forward(input, "", false)));
                twins.engine.backward(mean_square(twins.ours->forward(input, where, false)));
              },
              std::exception)
              << sharding.name();
          twins.engine.spend_gradients();
          if (step == 3) {
            const at::NoGradGuard no_grad;
            EXPECT_THROW(twins.ours->forward(input, "forward", false), std::exception);
            twins.ours->forward(input, "", false);
          }
          twins.step([&](FragileNet& net, int rank) {
            return mean_square(net->forward(chain_input(rank, step), step % 4 == 0 ? "forward" : "", true));
          });
        }
        twins.expect_equal();
      }
  });
}

}  // namespace
}  // namespace bonfire::uses_test
