// Gradients that are rounded on their way, beside plain torch that rounds them and beside data parallelism's.
#include <algorithm>
#include <memory>
#include <vector>

#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include "bonfire/server/server.h"
#include "bonfire/server/worker.h"
#include "bonfire/shard/engine.h"
#include "tests/shard/twins.h"
#include "tests/support/ranks.h"

namespace bonfire::testing::compression_test {
namespace {

constexpr int workers = 3;
constexpr double rate = 0.5;

using Weights = std::vector<at::Tensor>;

at::Tensor loss_of(Chain& net, int worker) { return net->forward(chain_input(worker, 1), {0, 1, 2}).pow(2).mean(); }

Weights weights_of(Chain& net) {
  Weights weights;
  for (const auto& parameter : net->parameters()) weights.push_back(parameter.detach().clone());
  return weights;
}

Weights served(int servers, plan::Compression compression) {
  Weights weights;
  const ServerOptions options{.servers = servers, .compression = compression};
  run_ranks(servers + workers, [&](World& world) {
    if (is_server(world, options)) {
      Server server(world, options, [](Shares& shares) { return std::make_unique<Sgd>(shares, SgdOptions{.lr = rate}); });
      server.serve();
      return;
    }
    const int me = world.rank() - servers;
    Chain net(3);
    Worker worker(world, net, options);
    worker.backward(loss_of(net, me));
    worker.step();
    worker.await();
    if (me == 0) weights = weights_of(net);
    worker.finish();
  });
  return weights;
}

Weights data_parallel(plan::Compression compression) {
  Weights weights;
  run_ranks(workers, [&](World& world) {
    Chain net(3);
    auto engine = shard(world.mesh({.replicate = workers}), net, {.reduction = {.compression = compression}});
    Sgd optimizer(engine, {.lr = rate});
    engine.backward(loss_of(net, world.rank()));
    optimizer.step();
    if (world.rank() == 0) weights = weights_of(net);
  });
  return weights;
}

// Each worker's gradient is rounded once, and added in fp64: of fp16 its third, so that sums do not overflow.
Weights rounded(at::ScalarType type) {
  Chain net(3);
  const auto all = net->parameters();
  Weights mean;
  for (const auto& parameter : all) mean.push_back(at::zeros_like(parameter));
  for (int worker = 0; worker < workers; ++worker) {
    net->zero_grad();
    loss_of(net, worker).backward();
    for (std::size_t at = 0; at < all.size(); ++at)
      mean[at] += type == at::kHalf ? (all[at].grad() / workers).to(type).to(at::kDouble)
                                    : all[at].grad().to(type).to(at::kDouble) / workers;
  }
  Weights weights;
  for (std::size_t at = 0; at < all.size(); ++at) weights.push_back(all[at].detach() - rate * mean[at]);
  return weights;
}

void expect_rounded(plan::Compression compression, at::ScalarType type, double step) {
  const Weights expected = rounded(type), replicas = data_parallel(compression), start = [] {
    Chain net(3);
    return weights_of(net);
  }();
  const auto distance = [](const Weights& a, const Weights& b) {
    double most = 0;
    for (std::size_t at = 0; at < a.size(); ++at) most = std::max(most, (a[at] - b[at]).abs().max().item<double>());
    return most;
  };
  const double moved = distance(expected, start);
  EXPECT_GT(moved, 0.01);
  for (const int servers : {1, 2}) {
    SCOPED_TRACE(fmt::format("{} servers", servers));
    const auto got = served(servers, compression);
    EXPECT_LE(distance(got, expected), 1e-12);
    // Replicas add in the type itself, and round each sum.
    EXPECT_LE(distance(got, replicas), workers * step * moved);
  }
}

TEST(ServerCompression, RoundsEachGradientOnce) {
  expect_rounded(plan::Compression::bf16, at::kBFloat16, 0x1p-8);
  expect_rounded(plan::Compression::fp16, at::kHalf, 0x1p-11);
}

}  // namespace
}  // namespace bonfire::testing::compression_test
