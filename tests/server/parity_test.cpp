// Workers and servers in synchronous mode train like data-parallel ranks.
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include "bonfire/base/error.h"
#include "bonfire/optim/optimizer.h"
#include "bonfire/server/server.h"
#include "bonfire/server/worker.h"
#include "bonfire/shard/engine.h"
#include "bonfire/shard/mean_scale.h"
#include "tests/shard/twins.h"
#include "tests/support/ranks.h"
#include "tests/support/thrown.h"

namespace bonfire::testing::parity_test {
namespace {

constexpr int steps = 4;

struct Kind {
  std::string name;
  std::function<std::unique_ptr<Optimizer>(Shares&)> make;
};

const std::vector<Kind>& kinds() {
  static const std::vector<Kind> all{
      {"sgd", [](Shares& shares) { return std::make_unique<Sgd>(shares, SgdOptions{.lr = 0.1}); }},
      {"momentum",
       [](Shares& shares) {
         return std::make_unique<Sgd>(shares,
                                      SgdOptions{.lr = 0.1, .momentum = 0.9, .weight_decay = 0.01, .nesterov = true});
       }},
      {"adam", [](Shares& shares) { return std::make_unique<Adam>(shares, AdamOptions{.lr = 0.05, .amsgrad = true}); }},
      {"adamw",
       [](Shares& shares) { return std::make_unique<AdamW>(shares, AdamOptions{.lr = 0.05, .weight_decay = 0.1}); }}};
  return all;
}

at::Tensor loss_of(Chain& net, int worker, int step) {
  return net->forward(chain_input(worker, step), {0, 1, 2}).pow(2).mean() * (1 + 0.1 * worker);
}

using Weights = std::vector<at::Tensor>;

Weights weights_of(torch::nn::Module& net) {
  Weights weights;
  for (const auto& parameter : net.parameters()) weights.push_back(parameter.detach().clone());
  return weights;
}

struct Setting {
  StepOptions step{};
  Pulled pulled = Pulled::weights;
};

Weights data_parallel(int ranks, const Kind& kind, const Setting& how) {
  Weights weights;
  run_ranks(ranks, [&](World& world) {
    Chain net(3);
    auto engine = shard(world.mesh({.replicate = ranks}), net);
    const auto optimizer = kind.make(engine);
    for (int step = 0; step < steps; ++step) {
      engine.backward(loss_of(net, world.rank(), step));
      optimizer->step(how.step);
    }
    if (world.rank() == 0) weights = weights_of(*net);
  });
  return weights;
}

std::vector<Weights> served(int workers, int servers, const Kind& kind, const Setting& how) {
  std::vector<Weights> weights(static_cast<std::size_t>(workers));
  const ServerOptions options{
      .servers = servers, .pulled = how.pulled, .clip = how.step.clip, .skip_non_finite = how.step.skip_non_finite};
  run_ranks(workers + servers, [&](World& world) {
    if (is_server(world, options)) {
      Server server(world, options, kind.make);
      const auto report = server.serve();
      EXPECT_EQ(report.updates, steps);
      EXPECT_EQ(report.most_stale, 0);
      return;
    }
    const int me = world.rank() - servers;
    Chain net(3);
    {
      // Weights are worker 0's.
      const at::NoGradGuard no_grad;
      if (me > 0)
        for (auto& parameter : net->parameters()) parameter.add_(me);
    }
    Worker worker(world, net, options);
    std::unique_ptr<Optimizer> own;
    if (how.pulled == Pulled::gradients) own = kind.make(worker.engine());
    for (int step = 0; step < steps; ++step) {
      const auto loss = loss_of(net, me, step);
      worker.backward(loss);
      own ? static_cast<void>(own->step(how.step)) : worker.step(loss.item<double>());
    }
    worker.await();
    weights[static_cast<std::size_t>(me)] = weights_of(*net);
    worker.finish();
  });
  return weights;
}

void expect_alike(int workers, int servers, const Kind& kind, const Setting& how) {
  SCOPED_TRACE(fmt::format("{} workers, {} servers, {}", workers, servers, kind.name));
  const auto expected = data_parallel(workers, kind, how);
  for (const auto& weights : served(workers, servers, kind, how))
    for (std::size_t at = 0; at < expected.size(); ++at)
      EXPECT_LE((weights[at] - expected[at]).abs().max().item<double>(), 1e-12) << "parameter " << at;
}

TEST(ServerParity, SynchronousServersTrainLikeDataParallelRanks) {
  for (const int workers : {1, 2, 4, 8})
    for (const int servers : {1, 3})
      for (const auto& kind : kinds()) expect_alike(workers, servers, kind, {});
}

TEST(ServerParity, ClipsByTheNormOfTheWholeModel) {
  for (const int servers : {1, 3})
    expect_alike(3, servers, kinds().back(), {.step = {.clip = 0.05, .skip_non_finite = true}});
}

// Servers know nothing of what a worker's mean is of.
TEST(ServerParity, MeansOverAllWorkersTargetsAreRefused) {
  for (const auto mode : {ServerMode::synchronous, ServerMode::asynchronous}) {
    const ServerOptions options{.mode = mode};
    run_ranks(2, [&](World& world) {
      if (is_server(world, options)) return static_cast<void>(Server(world, options, kinds().front().make).serve());
      Chain net(3);
      Worker worker(world, net, options);
      expect_part(thrown<Error>([&] { mean_scale(worker.engine(), 3); }),
                  mode == ServerMode::synchronous
                      ? "mean_scale beside a parameter server, which averages the workers' means and weighs workers alike; "
                        "allowed: the mean over this rank's own targets"
                      : "mean_scale beside a parameter server in asynchronous mode, where each worker's mean is an update");
      worker.finish();
    });
  }
}

TEST(ServerParity, WorkersMayPullTheAverageInPlaceOfWeights) {
  for (const int servers : {1, 2}) expect_alike(3, servers, kinds().back(), {.pulled = Pulled::gradients});
}

}  // namespace
}  // namespace bonfire::testing::parity_test
