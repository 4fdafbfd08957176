#pragma once

#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/nn/modules/linear.h>

#include "bonfire/base/random.h"
#include "bonfire/nn/unit.h"
#include "bonfire/optim/optimizer.h"
#include "bonfire/shard/engine.h"
#include "tests/support/ranks.h"

// A net that is trained by an engine, beside the same net on plain torch that does the work of all ranks by itself.
namespace bonfire::testing {

inline at::Tensor numbers(at::IntArrayRef shape, std::uint64_t seed, at::ScalarType dtype = at::kDouble) {
  auto values = at::empty(shape, at::kDouble);
  const Random random(seed);
  for (std::int64_t at = 0; at < values.numel(); ++at) values.data_ptr<double>()[at] = random.normal(at);
  return values.to(dtype);
}

// The same numbers in every rank and every run.
inline void initialise(torch::nn::Module& net, at::ScalarType dtype = at::kDouble) {
  net.to(dtype);
  const at::NoGradGuard no_grad;
  std::uint64_t seed = 100;
  for (auto& parameter : net.parameters()) parameter.copy_(numbers(parameter.sizes(), ++seed).mul(0.3));
}

// One way to divide four ranks.
struct Sharding {
  int factor = 1;
  Sharded what = Sharded::none;
  ReshardAfterForward reshard = true;
  int prefetch = 2;
  plan::BucketOptions buckets{.bucket_bytes = 700, .first_bucket_bytes = 300};

  ShardOptions options(ShardOptions rest = {}) const {
    rest.what = what;
    rest.reshard_after_forward = reshard;
    rest.prefetch = prefetch;
    rest.buckets = buckets;
    return rest;
  }
  std::string name() const {
    return fmt::format("F = {}, {}, {}{}, prefetch {}", factor, plan::name_of(what), reshard.free ? "free" : "keep",
                       reshard.ranks ? fmt::format(" to {}", reshard.ranks) : "", prefetch);
  }
};

inline constexpr int sharding_ranks = 4;

// Everything that can be sharded, once; and parameters, which come and go, in all their ways.
inline const std::vector<Sharding>& gathering_shardings() {
  static const std::vector<Sharding> all{{2, Sharded::parameters, true, 0},
                                         {4, Sharded::parameters, true, 2},
                                         {4, Sharded::parameters, false, 1},
                                         {4, Sharded::parameters, 2, 1}};
  return all;
}
inline const std::vector<Sharding>& shardings() {
  static const std::vector<Sharding> all = [] {
    std::vector<Sharding> list{{1, Sharded::none}, {2, Sharded::optimizer}, {4, Sharded::gradients}};
    list.insert(list.end(), gathering_shardings().begin(), gathering_shardings().end());
    return list;
  }();
  return all;
}

template <class Net>
class Twins {
 public:
  template <class Make>
  Twins(const World& world, const Sharding& sharding, const Make& make, ShardOptions options = {})
      : rank(world.rank()),
        size(world.size()),
        ours(make()),
        theirs(make()),
        engine(shard(world.mesh({.replicate = world.size() / sharding.factor, .shard = sharding.factor}), ours,
                     sharding.options(std::move(options)))),
        optimizer(engine, {.lr = rate}),
        name_(sharding.name()) {}

  // `loss` is called with a net and the rank whose part of the work is meant.
  template <class Loss>
  void accumulate(const Loss& loss) {
    engine.accumulate(loss(ours, rank));
    add(loss);
  }
  template <class Loss>
  void backward(const Loss& loss) {
    engine.backward(loss(ours, rank));
    add(loss);
  }
  void update() {
    optimizer.step();
    update_theirs();
  }
  template <class Loss>
  void step(const Loss& loss) {
    backward(loss);
    update();
  }

  // Their half of the above.
  template <class Loss>
  void add(const Loss& loss) {
    for (int other = 0; other < size; ++other) (loss(theirs, other) / size).backward();
  }
  void update_theirs() {
    const at::NoGradGuard no_grad;
    for (auto& parameter : theirs->parameters()) {
      if (parameter.grad().defined()) parameter.sub_(parameter.grad() * rate);
      parameter.mutable_grad().reset();
    }
  }

  // Collective.
  void expect_equal(double tolerance = 1e-12) {
    engine.check_equal();
    const auto whole = engine.full_parameters();
    const auto mine = ours->named_parameters();
    for (const auto& item : theirs->named_parameters()) {
      if (item.value().numel() == 0) continue;
      const auto difference =
          (mine[item.key()].to(at::kDouble) - item.value().to(at::kDouble)).abs().max().template item<double>();
      EXPECT_LE(difference, tolerance) << item.key() << ", rank " << rank << ", " << name_;
    }
  }

  static constexpr double rate = 0.1;
  int rank, size;
  Net ours, theirs;
  Engine engine;
  Sgd optimizer;

 private:
  std::string name_;
};

// A chain of equal Units; which of them run, and in which order, is decided anew at every forward.
struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(std::int64_t width) : linear(register_module("linear", torch::nn::Linear(width, width))) {
    gain = register_parameter("gain", at::ones({width}));
  }
  at::Tensor forward(const at::Tensor& x) { return x + linear->forward(x).tanh() * gain; }
  torch::nn::Linear linear;
  at::Tensor gain;
};
BONFIRE_UNIT(Block);

using Order = std::vector<std::size_t>;

struct ChainImpl : torch::nn::Module {
  static constexpr std::int64_t width = 6;
  explicit ChainImpl(std::size_t length) : head(register_module("head", torch::nn::Linear(width, 3))) {
    for (std::size_t at = 0; at < length; ++at) blocks.push_back(register_module(fmt::format("block{}", at), Block(width)));
    initialise(*this);
  }
  at::Tensor forward(const at::Tensor& x, const Order& order) {
    at::Tensor y = x;
    for (const std::size_t at : order) y = blocks[at]->forward(y);
    return head->forward(y);
  }
  std::vector<Block> blocks;
  torch::nn::Linear head;
};
BONFIRE_UNIT(Chain);

inline at::Tensor chain_input(int rank, int step) {
  return numbers({3, ChainImpl::width}, static_cast<std::uint64_t>(1000 * step + rank));
}

}  // namespace bonfire::testing
