// Stages whose parameters are registered in another order than backward finishes them: the order that the first step teaches
// moves parameters between buffers, and their averaged gradients with them.
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/nn/modules/linear.h>

#include "bonfire/nn/unit.h"
#include "bonfire/optim/optimizer.h"
#include "bonfire/pipeline/pipeline.h"
#include "bonfire/schedule/generate.h"
#include "tests/pipeline/skip_chain.h"
#include "tests/support/ranks.h"

namespace bonfire::orders_test {
namespace {

using testing::numbers;
using testing::run_ranks;

constexpr std::int64_t width = 6;
constexpr double rate = 0.1;

// Two layers, registered in the order of use or in the opposite one.
struct TwoImpl : torch::nn::Module {
  TwoImpl(bool reversed, int unit) {
    for (const bool first : {!reversed, reversed})
      (first ? p : q) = register_module(first ? "p" : "q", torch::nn::Linear(width, width));
    to(at::kDouble);
    const at::NoGradGuard no_grad;
    double shift = unit;
    for (auto* layer : {&p, &q})
      for (auto& parameter : (*layer)->parameters()) parameter.copy_(numbers(parameter.sizes(), shift += 7));
  }
  at::Tensor run(const at::Tensor& x) { return q->forward(p->forward(x).tanh()).tanh(); }
  torch::nn::Linear p{nullptr}, q{nullptr};
};

Chain two_units(bool reversed) {
  Chain chain{.units = {"u0", "u1"}};
  chain.build = [reversed](UnitRange range) {
    auto two = std::make_shared<TwoImpl>(reversed, range.begin);
    return StageModule{two, [two, last = range.end == 2](Tensors values, const Microbatch& microbatch) {
                         const auto out = two->run(values[0]);
                         return Tensors{last ? (out - microbatch.target[0]).pow(2).mean() : out};
                       }};
  };
  return chain;
}

std::vector<Microbatch> batch_of(int step, int data_rank) {
  std::vector<Microbatch> batch;
  for (int at = 0; at < 2; ++at)
    batch.push_back({.input = {numbers({3, width}, 10 * data_rank + at + 40 * step)},
                     .target = {numbers({3, width}, at + 5 + 3 * data_rank)}});
  return batch;
}

TEST(Orders, ThatDifferFromRegistrationChangeNoGradient) {
  constexpr int steps = 3, data_ranks = 2;
  for (const bool reversed : {false, true}) {
    std::vector<std::shared_ptr<TwoImpl>> plain{std::make_shared<TwoImpl>(reversed, 0),
                                                std::make_shared<TwoImpl>(reversed, 1)};
    for (int step = 0; step < steps; ++step) {
      for (int rank = 0; rank < data_ranks; ++rank)
        for (const auto& microbatch : batch_of(step, rank))
          ((plain[1]->run(plain[0]->run(microbatch.input[0])) - microbatch.target[0]).pow(2).mean() / (2 * data_ranks))
              .backward();
      const at::NoGradGuard no_grad;
      for (auto& unit : plain)
        for (auto& parameter : unit->parameters()) parameter.sub_(parameter.grad() * rate), parameter.mutable_grad().reset();
    }
    for (const Sharded what : {Sharded::none, Sharded::optimizer, Sharded::gradients, Sharded::parameters})
      run_ranks(4, [&](World& world) {
        const Mesh mesh = world.mesh(what == Sharded::none ? MeshShape{.pipeline = 2, .replicate = 2}
                                                           : MeshShape{.pipeline = 2, .shard = 2});
        PipelineOptions options{.schedule = schedule::generate("1f1b", {.ranks = 2, .microbatches = 2})};
        options.shard.what = what;
        options.shard.buckets = {.bucket_bytes = 400, .first_bucket_bytes = 200};
        Pipeline pipeline(mesh, two_units(reversed), options);
        const int stage = pipeline.local_stages().front();
        Sgd sgd(pipeline.engine(stage), {.lr = rate});
        for (int step = 0; step < steps; ++step) {
          pipeline.step(batch_of(step, mesh.coordinate(Axis::data)));
          sgd.step();
        }
        const auto whole = pipeline.engine(stage).full_parameters();
        const auto expected = plain[static_cast<std::size_t>(stage)]->named_parameters();
        for (const auto& item : pipeline.module(stage).named_parameters())
          EXPECT_LT((item.value().detach() - expected[item.key()]).abs().max().item<double>(), 1e-14)
              << item.key() << (reversed ? ", opposite order, " : ", same order, ") << plan::name_of(what);
      });
  }
}

// Units side by side, run in any order.
struct LeafImpl : torch::nn::Module {
  explicit LeafImpl(int number) : linear(register_module("linear", torch::nn::Linear(width, width))) {
    to(at::kDouble);
    const at::NoGradGuard no_grad;
    double shift = 5 * number;
    for (auto& parameter : parameters()) parameter.copy_(numbers(parameter.sizes(), shift += 2));
  }
  at::Tensor forward(const at::Tensor& x) { return linear->forward(x).tanh(); }
  torch::nn::Linear linear;
};
BONFIRE_UNIT(Leaf);

constexpr int leaves = 8;
using Order = std::vector<int>;

struct FanImpl : torch::nn::Module {
  explicit FanImpl(int unit) {
    for (int at = 0; at < leaves; ++at) all.push_back(register_module(fmt::format("leaf{}", at), Leaf(leaves * unit + at)));
  }
  at::Tensor forward(const at::Tensor& x, const Order& order) {
    auto sum = x;
    for (const int at : order) sum = sum + all[static_cast<std::size_t>(at)]->forward(x);
    return sum;
  }
  std::vector<Leaf> all;
};
BONFIRE_UNIT(Fan);

// What a rank runs in a step.
using OrderOf = std::function<Order(int step, int rank)>;

Chain two_fans(const std::function<Order()>& order) {
  Chain chain{.units = {"u0", "u1"}};
  chain.build = [order](UnitRange range) {
    Fan fan(range.begin);
    return StageModule{fan.ptr(), [fan, order, last = range.end == 2](Tensors values, const Microbatch& microbatch) mutable {
                         const auto out = fan->forward(values[0], order());
                         return Tensors{last ? (out - microbatch.target[0]).pow(2).mean() : out};
                       }};
  };
  return chain;
}

void expect_plain_training(const MeshShape& shape, const OrderOf& order_of) {
  constexpr int steps = 4;
  const int data_ranks = shape.replicate * shape.shard;
  const std::vector<std::shared_ptr<FanImpl>> plain{std::make_shared<FanImpl>(0), std::make_shared<FanImpl>(1)};
  for (int step = 0; step < steps; ++step) {
    for (int rank = 0; rank < data_ranks; ++rank)
      for (const auto& microbatch : batch_of(step, rank)) {
        const auto order = order_of(step, rank);
        const auto out = plain[1]->forward(plain[0]->forward(microbatch.input[0], order), order);
        ((out - microbatch.target[0]).pow(2).mean() / (2 * data_ranks)).backward();
      }
    const at::NoGradGuard no_grad;
    for (auto& unit : plain)
      for (auto& parameter : unit->parameters()) {
        if (parameter.grad().defined()) parameter.sub_(parameter.grad() * rate);
        parameter.mutable_grad().reset();
      }
  }
  run_ranks(4, [&](World& world) {
    const Mesh mesh = world.mesh(shape);
    const int rank = mesh.coordinate(Axis::data);
    PipelineOptions options{.schedule = schedule::generate(
                                "interleaved", {.ranks = shape.pipeline, .microbatches = 2, .chunks = 2 / shape.pipeline})};
    options.shard = {.what = Sharded::parameters,
                     .reshard_after_forward = true,
                     .prefetch = 1,
                     .patience = std::chrono::milliseconds(100),
                     .log = Log::silent()};
    int step = 0;
    Pipeline pipeline(mesh, two_fans([&] { return order_of(step, rank); }), options);
    Sgd sgd(pipeline, {.lr = rate});
    for (; step < steps; ++step) {
      pipeline.step(batch_of(step, rank));
      sgd.step();
    }
    for (const int stage : pipeline.local_stages()) {
      const auto whole = pipeline.engine(stage).full_parameters();
      const auto expected = plain[static_cast<std::size_t>(stage)]->named_parameters();
      for (const auto& item : pipeline.module(stage).named_parameters())
        EXPECT_LT((item.value().detach() - expected[item.key()]).abs().max().item<double>(), 1e-13) << item.key();
    }
  });
}

Order upwards() { return {0, 1, 2, 3, 4, 5, 6, 7}; }
Order downwards() { return {7, 6, 5, 4, 3, 2, 1, 0}; }

// The ranks that share a stage may run the Units in it in different orders: that costs time, and nothing else.
TEST(Orders, OfUnitsInAStageMayDifferBetweenRanks) {
  const MeshShape shape{.pipeline = 2, .shard = 2};
  expect_plain_training(shape, [](int, int rank) { return rank == 0 ? upwards() : downwards(); });
  // Only when there is an order to follow.
  expect_plain_training(shape, [](int step, int rank) { return step == 0 || rank == 0 ? upwards() : downwards(); });
  // One of them leaves out some.
  expect_plain_training(shape, [](int step, int rank) { return step == 0 || rank == 0 ? upwards() : Order{6, 2, 3}; });
}

}  // namespace
}  // namespace bonfire::orders_test
