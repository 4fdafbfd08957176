// The first backward shows in which order gradients come, and parameters move to the buckets that this order makes. Whatever
// moves, and wherever it was registered, every step is plain torch's.
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/normalization.h>

#include "tests/shard/twins.h"

namespace bonfire::learned_order_test {
namespace {

using testing::Block;
using testing::Chain;
using testing::chain_input;
using testing::ChainImpl;
using testing::initialise;
using testing::run_ranks;
using testing::Sharding;
using testing::Twins;
using torch::nn::LayerNorm;
using torch::nn::LayerNormOptions;
using torch::nn::Linear;

constexpr std::int64_t width = ChainImpl::width;

// Registered in the order of use, in the opposite one, or with the last part first. No Units: a group for each parameter.
struct LooseImpl : torch::nn::Module {
  enum class Order { of_use, opposite, head_first };
  explicit LooseImpl(Order order) {
    const auto part = [&](int which) {
      if (which == 0) first = register_module("first", Linear(width, width));
      if (which == 1) norm = register_module("norm", LayerNorm(LayerNormOptions({width})));
      if (which == 2) head = register_module("head", Linear(width, 3));
    };
    for (int at = 0; at < 3; ++at) part(order == Order::of_use ? at : order == Order::opposite ? 2 - at : (at + 2) % 3);
    initialise(*this);
  }
  at::Tensor forward(const at::Tensor& x) { return head->forward(norm->forward(first->forward(x).tanh())); }
  Linear first{nullptr}, head{nullptr};
  LayerNorm norm{nullptr};
};
TORCH_MODULE(Loose);

// A root with parameters of its own, which backward finishes first, between Units.
struct RootedImpl : torch::nn::Module {
  RootedImpl() : a(register_module("a", Block(width))) {
    scale = register_parameter("scale", at::ones({width}));
    b = register_module("b", Block(width));
    initialise(*this);
  }
  at::Tensor forward(const at::Tensor& x) { return b->forward(a->forward(x)) * scale; }
  Block a;
  at::Tensor scale;
  Block b{nullptr};
};
BONFIRE_UNIT(Rooted);

// Buckets that hold everything, several parts, or little more than one.
const std::vector<plan::BucketOptions>& bucket_sizes() {
  static const std::vector<plan::BucketOptions> all{{},
                                                    {.bucket_bytes = 1 << 20, .first_bucket_bytes = 300},
                                                    {.bucket_bytes = 1024, .first_bucket_bytes = 512},
                                                    {.bucket_bytes = 512, .first_bucket_bytes = 512}};
  return all;
}

// What is sharded by how many of `ranks`; with whole gradients until the last microbatch, too.
std::vector<std::pair<Sharding, Accumulation>> ways(int ranks) {
  std::vector<std::pair<Sharding, Accumulation>> all{{{1, Sharded::none}, Accumulation::sharded}};
  for (int factor = 2; factor <= ranks; factor *= 2)
    for (const auto accumulation : {Accumulation::sharded, Accumulation::full})
      for (const auto what : {Sharded::optimizer, Sharded::gradients}) all.push_back({{factor, what}, accumulation});
  return all;
}

template <class Net, class Make, class Loss>
void expect_plain_torch(const Make& make, const Loss& loss) {
  for (const int ranks : {2, 4})
    run_ranks(ranks, [&](World& world) {
      for (const auto& buckets : bucket_sizes())
        for (auto [sharding, accumulation] : ways(ranks)) {
          sharding.buckets = buckets;
          Twins<Net> twins(world, sharding, make, {.accumulation = accumulation});
          for (int step = 0; step < 3; ++step) {
            twins.accumulate([&](Net& net, int rank) { return loss(net, chain_input(rank, 10 + step)); });
            twins.step([&](Net& net, int rank) { return loss(net, chain_input(rank, step)); });
            twins.expect_equal();
          }
        }
    });
}

at::Tensor mean_square(const at::Tensor& y) { return y.pow(2).mean(); }

TEST(LearnedOrder, AChainWhoseRootOwnsItsHead) {
  expect_plain_torch<Chain>([] { return Chain(4); },
                            [](Chain& net, const at::Tensor& x) {
                              return mean_square(net->forward(x, {0, 1, 2, 3}));
                            });
}

TEST(LearnedOrder, ARootWithParametersBetweenUnits) {
  expect_plain_torch<Rooted>([] { return Rooted(); },
                             [](Rooted& net, const at::Tensor& x) { return mean_square(net->forward(x)); });
}

TEST(LearnedOrder, LayersInAnyOrderOfRegistration) {
  for (const auto order : {LooseImpl::Order::of_use, LooseImpl::Order::opposite, LooseImpl::Order::head_first})
    expect_plain_torch<Loose>([order] { return Loose(order); },
                              [](Loose& net, const at::Tensor& x) { return mean_square(net->forward(x)); });
}

TEST(LearnedOrder, ASequentialWithANorm) {
  expect_plain_torch<torch::nn::Sequential>(
      [] {
        torch::nn::Sequential net(Linear(width, width), LayerNorm(LayerNormOptions({width})), Linear(width, width));
        initialise(*net);
        return net;
      },
      [](torch::nn::Sequential& net, const at::Tensor& x) { return mean_square(net->forward(x)); });
}

// In which order parameters lie in a bucket makes no difference, so nothing moves for it.
TEST(LearnedOrder, OneBucketStaysWhereItIs) {
  run_ranks(2, [](World& world) {
    Loose net(LooseImpl::Order::opposite);
    Engine engine = shard(world.mesh({.shard = 2}), net, {.what = Sharded::optimizer});
    const void* const place = net->first->weight.data_ptr();
    engine.backward(mean_square(net->forward(chain_input(world.rank(), 0))));
    EXPECT_EQ(engine.flats().size(), 1u);
    EXPECT_EQ(net->first->weight.data_ptr(), place);
  });
}

}  // namespace
}  // namespace bonfire::learned_order_test
