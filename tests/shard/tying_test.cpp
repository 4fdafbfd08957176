// Which parameters belong together: tied ones, ignored ones, and every way to wrap.
#include <torch/nn/modules/embedding.h>

#include "tests/shard/twins.h"

namespace bonfire::tying_test {
namespace {

using testing::Block;
using testing::Chain;
using testing::chain_input;
using testing::gathering_shardings;
using testing::initialise;
using testing::run_ranks;
using testing::Sharding;
using testing::shardings;
using testing::Twins;
using torch::nn::Linear;

constexpr std::int64_t width = 6, words = 11;
constexpr int steps = 3;

struct InImpl : torch::nn::Module {
  InImpl() : table(register_module("table", torch::nn::Embedding(words, width))) {}
  at::Tensor forward(const at::Tensor& tokens) { return table->forward(tokens); }
  torch::nn::Embedding table;
};
BONFIRE_UNIT(In);

struct OutImpl : torch::nn::Module {
  explicit OutImpl(const at::Tensor& tied) : bias(register_parameter("bias", at::zeros({words}))) {
    weight = register_parameter("weight", tied);
  }
  at::Tensor forward(const at::Tensor& x) { return x.matmul(weight.t()) + bias; }
  at::Tensor bias, weight;
};
BONFIRE_UNIT(Out);

enum class Tie { tensor, memory };

// The two ends share a weight: one tensor, or two over one memory. Made in fp64 at once: to() would untie the latter.
struct TiedImpl : torch::nn::Module {
  explicit TiedImpl(Tie tie) : in(register_module("in", In())), block(register_module("block", Block(width))) {
    in->to(at::kDouble);
    auto weight = in->table->weight;
    if (tie == Tie::memory) weight = weight.detach().set_requires_grad(true);
    out = register_module("out", Out(weight));
    block->to(at::kDouble);
    const at::NoGradGuard no_grad;
    out->bias.set_data(at::zeros({words}, at::kDouble));
    std::uint64_t seed = 7;
    for (auto& parameter : parameters()) parameter.copy_(testing::numbers(parameter.sizes(), ++seed).mul(0.3));
    in->table->weight.copy_(testing::numbers({words, width}, 3).mul(0.3));
  }
  at::Tensor forward(const at::Tensor& tokens) { return out->forward(block->forward(in->forward(tokens))); }
  In in;
  Block block;
  Out out{nullptr};
};
BONFIRE_UNIT(Tied);

TEST(Tying, ReachesAcrossUnits) {
  run_ranks(testing::sharding_ranks, [](World& world) {
    for (const Tie tie : {Tie::tensor, Tie::memory})
      for (const Sharding& sharding : shardings()) {
        Twins<Tied> twins(world, sharding, [&] { return Tied(tie); });
        for (int step = 0; step < steps; ++step)
          twins.step([&](Tied& net, int rank) {
            return net->forward(at::arange(5).mul(3 + rank).add(step).remainder(words)).pow(2).mean();
          });
        twins.expect_equal();
        const auto whole = twins.engine.full_parameters();
        EXPECT_EQ(twins.ours->in->table->weight.data_ptr(), twins.ours->out->weight.data_ptr());
        // One gradient and one optimizer state for both.
        std::int64_t elements = 0;
        for (const auto& flat : twins.engine.flats())
          for (const auto& segment : flat->layout().segments) elements += segment.elements;
        EXPECT_EQ(elements, words * width + words + width * width + 2 * width);
      }
  });
}

// Two tensors over one memory, of which forward reads the one that was registered last.
struct SecondNameImpl : torch::nn::Module {
  SecondNameImpl() {
    first = register_parameter("first", testing::numbers({width, width}, 3).mul(0.3));
    second = register_parameter("second", first.detach());
  }
  at::Tensor forward(const at::Tensor& x) { return x.matmul(second); }
  at::Tensor first, second;
};
BONFIRE_UNIT(SecondName);

TEST(Tying, MicrobatchesAddUpUnderAnyName) {
  run_ranks(testing::sharding_ranks, [](World& world) {
    for (const Sharding& sharding : shardings()) {
      Twins<SecondName> twins(world, sharding, [] { return SecondName(); });
      for (int step = 0; step < steps; ++step) {
        const auto loss = [&](int microbatch) {
          return [=](SecondName& net, int rank) {
            return net->forward(chain_input(rank, 2 * step + microbatch)).pow(2).mean();
          };
        };
        twins.accumulate(loss(0));
        twins.step(loss(1));
      }
      twins.expect_equal();
    }
  });
}

// Ignored parameters stay where they were, whole and each rank's own.
TEST(Ignored, StaysUntouchedAndLocal) {
  run_ranks(testing::sharding_ranks, [](World& world) {
    for (const Sharding& sharding : shardings()) {
      Chain net(4);
      {
        const at::NoGradGuard no_grad;
        net->blocks[1]->gain.fill_(world.rank());  // may differ
      }
      const std::vector<at::Tensor> ignored{net->blocks[1]->linear->weight, net->blocks[1]->linear->bias,
                                            net->blocks[1]->gain, net->head->bias};
      std::vector<const void*> memory;
      for (const auto& parameter : ignored) memory.push_back(parameter.data_ptr());
      Engine engine =
          shard(world.mesh({.replicate = 4 / sharding.factor, .shard = sharding.factor}), net,
                sharding.options({.wrapping = {.ignored_modules = {"block1"}, .ignored_parameters = {"head.bias"}}}));
      Sgd optimizer(engine, {.lr = 0.1});
      for (int step = 0; step < steps; ++step) {
        for (const auto& parameter : ignored) parameter.mutable_grad().reset();
        engine.backward(net->forward(chain_input(world.rank(), step), {0, 1, 2, 3}).pow(2).mean());
        optimizer.step();
        for (std::size_t at = 0; at < ignored.size(); ++at) {
          EXPECT_EQ(ignored[at].data_ptr(), memory[at]);
          EXPECT_TRUE(ignored[at].grad().defined());
        }
        EXPECT_EQ(ignored[2].sum().item<double>(), 6.0 * world.rank());
        // Not averaged: the ranks' data differ, and so do these.
        const double norm = ignored[3].grad().norm().item<double>();
        EXPECT_NE(world.group().max(norm), -world.group().max(-norm));
      }
    }
  });
}

struct PairImpl : torch::nn::Module {
  PairImpl()
      : first(register_module("first", Block(width))),
        middle(register_module("middle", Linear(width, width))),
        second(register_module("second", Block(width))) {}
  at::Tensor forward(const at::Tensor& x) { return second->forward(middle->forward(first->forward(x)).tanh()); }
  Block first;
  Linear middle;
  Block second;
};
BONFIRE_UNIT(Pair);

struct TreeImpl : torch::nn::Module {
  TreeImpl()
      : left(register_module("left", Pair())),
        right(register_module("right", Pair())),
        top(register_module("top", Linear(width, width))) {
    initialise(*this);
  }
  at::Tensor forward(const at::Tensor& x) { return top->forward(right->forward(left->forward(x)) + left->forward(x)); }
  Pair left, right;
  Linear top;
};
BONFIRE_UNIT(Tree);

TEST(Wrapped, InEveryWayTrainsAlike) {
  const std::vector<std::pair<Wrapping, std::size_t>> ways{
      {{}, 7},
      {{.types = {"Pair"}}, 3},
      {{.types = {"Block"}}, 5},
      {{.min_parameters = 45}, 5},
      {{.min_parameters = 50}, 3},
      {{.predicate = [](const std::string& path, torch::nn::Module&) { return path.starts_with("left"); }}, 4},
      {{.all_in_one = true}, 1}};
  run_ranks(testing::sharding_ranks, [&](World& world) {
    for (const auto& [wrapping, units] : ways)
      for (const Sharding& sharding : gathering_shardings()) {
        Twins<Tree> twins(world, sharding, [] { return Tree(); }, {.wrapping = wrapping});
        EXPECT_EQ(twins.engine.flats().size(), units);
        for (int step = 0; step < steps; ++step)
          twins.step([&](Tree& net, int rank) { return net->forward(chain_input(rank, step)).pow(2).mean(); });
        twins.expect_equal();
      }
  });
}

}  // namespace
}  // namespace bonfire::tying_test
