// Asynchronous and bounded modes, and backup workers, beside a replay of the recorded order of updates.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include "bonfire/base/random.h"
#include "bonfire/server/server.h"
#include "bonfire/server/worker.h"
#include "tests/server/gate.h"
#include "tests/server/replay.h"
#include "tests/shard/twins.h"
#include "tests/support/ranks.h"

namespace bonfire::testing::modes_test {
namespace {

at::Tensor loss_of(Chain& net, int worker, std::int64_t step) {
  return net->forward(chain_input(worker, static_cast<int>(step)), {0, 1, 2}).pow(2).mean() * (1 + 0.1 * worker);
}

struct Trained {
  std::vector<ServerReport> reports;
  std::vector<at::Tensor> weights;  // the servers'
};

struct Run {
  ServerOptions options{};
  int workers = 3;
  std::int64_t steps = 6;
  bool adam = true;
  // Called before each step of a worker, and when its answer has come.
  std::function<void(int worker, std::int64_t step)> before{}, after{};
};

Trained train(const Run& run) {
  const int servers = run.options.servers;
  Trained trained;
  trained.reports.resize(static_cast<std::size_t>(servers));
  Chain result(3);
  std::mutex mutex;
  auto options = run.options;
  options.keep_records = true;
  run_ranks(servers + run.workers, [&](World& world) {
    if (is_server(world, options)) {
      Server server(world, options, [&](Shares& shares) -> std::unique_ptr<Optimizer> {
        if (run.adam) return std::make_unique<AdamW>(shares, AdamOptions{.lr = 0.02, .weight_decay = 0.1});
        return std::make_unique<Sgd>(shares, SgdOptions{.lr = 0.05, .momentum = 0.5});
      });
      auto report = server.serve();
      const auto slices = server.slices();
      const std::lock_guard lock(mutex);
      trained.reports[static_cast<std::size_t>(world.rank())] = std::move(report);
      put_slices(slices, *result);
      return;
    }
    const int me = world.rank() - servers;
    Chain net(3);
    Worker worker(world, net, options);
    for (std::int64_t step = 1; step <= run.steps; ++step) {
      if (run.before) run.before(me, step);
      worker.backward(loss_of(net, me, step));
      worker.step();
      worker.await();
      if (run.after) run.after(me, step);
    }
    worker.finish();
  });
  for (const auto& parameter : result->parameters()) trained.weights.push_back(parameter.detach());
  return trained;
}

void expect_replayed(const Trained& trained, bool adam) {
  Replay replay;
  replay.make = [] { return Chain(3).ptr(); };
  // Registration: the head's two, then a gain, a weight and a bias for each block. Units are in the order of registration.
  Chain net(3);
  const auto named = net->named_parameters();
  std::vector<std::vector<std::size_t>> units;
  std::string last;
  for (std::size_t at = 0; at < named.size(); ++at) {
    auto name = named[at].key().substr(0, named[at].key().find('.'));
    if (units.empty() || name != last) units.emplace_back();
    units.back().push_back(at);
    last = name;
  }
  replay.units = units;
  replay.backward = [](torch::nn::Module& module, int worker, std::int64_t step) {
    auto& chain = dynamic_cast<ChainImpl&>(module);
    const auto loss =
        chain.forward(chain_input(worker, static_cast<int>(step)), {0, 1, 2}).pow(2).mean() * (1 + 0.1 * worker);
    loss.backward();
  };
  replay.optimizer = [adam](const std::vector<at::Tensor>& of) -> std::unique_ptr<torch::optim::Optimizer> {
    if (adam) return std::make_unique<torch::optim::AdamW>(of, torch::optim::AdamWOptions(0.02).weight_decay(0.1));
    return std::make_unique<torch::optim::SGD>(of, torch::optim::SGDOptions(0.05).momentum(0.5));
  };
  std::vector<std::vector<ServerUpdate>> updates;
  for (const auto& report : trained.reports) updates.push_back(report.updates_kept);
  const auto expected = replay.run(updates);
  for (std::size_t at = 0; at < expected.size(); ++at)
    EXPECT_LE((trained.weights[at] - expected[at]).abs().max().item<double>(), 1e-12) << named[at].key();
}

// When a worker's step is used, the slowest has come at least as far as it had when that step began.
void expect_within(const ServerReport& report, int workers, std::int64_t bound) {
  std::vector<std::int64_t> used(static_cast<std::size_t>(workers));
  for (const auto& update : report.updates_kept)
    for (const auto& push : update.pushes) {
      EXPECT_LE(push.step - 1 - *std::min_element(used.begin(), used.end()), bound)
          << "worker " << push.worker << ", step " << push.step;
      used[static_cast<std::size_t>(push.worker)] = push.step;
    }
}

// Each worker sleeps for a while that differs from step to step.
void stroll(int worker, std::int64_t step) {
  const Random random(77);
  std::this_thread::sleep_for(
      std::chrono::microseconds(static_cast<int>(5000 * random.uniform(static_cast<std::uint64_t>(100 * step + worker)))));
}

TEST(ServerModes, AsynchronousUpdatesEqualTheirReplay) {
  for (const int servers : {1, 3})
    for (const bool adam : {true, false}) {
      SCOPED_TRACE(fmt::format("{} servers, adam {}", servers, adam));
      Gate begun;  // with the same weights: all but the first of them are stale
      const auto trained = train({.options = {.servers = servers, .mode = ServerMode::asynchronous},
                                  .workers = 4,
                                  .steps = 8,
                                  .adam = adam,
                                  .before = [&](int worker, std::int64_t step) {
                                    if (step > 1) return stroll(worker, step);
                                    begun.add();
                                    begun.await(4);
                                  }});
      for (const auto& report : trained.reports) {
        EXPECT_EQ(report.updates, 4 * 8);
        EXPECT_GT(report.most_stale, 0);
      }
      expect_replayed(trained, adam);
    }
}

TEST(ServerModes, BoundedUpdatesEqualTheirReplayAndKeepToTheBound) {
  for (const int servers : {1, 3})
    for (const int bound : {0, 2}) {
      SCOPED_TRACE(fmt::format("{} servers, staleness {}", servers, bound));
      const auto trained = train({.options = {.servers = servers, .mode = ServerMode::bounded, .staleness = bound},
                                  .workers = 3,
                                  .steps = 8,
                                  .before = stroll});
      for (const auto& report : trained.reports) {
        EXPECT_EQ(report.updates, 3 * 8);
        EXPECT_LE(report.most_lead, bound);
        expect_within(report, 3, bound);
      }
      expect_replayed(trained, true);
    }
}

// A worker that does not begin before another one has gone as far ahead as it may.
TEST(ServerModes, TheBoundIsReachedAndNeverPassed) {
  constexpr int bound = 2;
  Gate fast;
  std::atomic<std::int64_t> done_by_slow{0};
  std::atomic<std::int64_t> most_ahead{0};
  const auto trained = train(
      {.options = {.mode = ServerMode::bounded, .staleness = bound},
       .workers = 2,
       .steps = 6,
       .before =
           [&](int worker, std::int64_t step) {
             if (worker == 1) {
               // Steps 1 to bound + 1 can begin.
               most_ahead = std::max<std::int64_t>(most_ahead, step - 1 - done_by_slow);
               fast.add();
             } else if (step == 1) {
               fast.await(bound + 1);
             }
           },
       .after = [&](int worker, std::int64_t step) { worker == 0 ? static_cast<void>(done_by_slow = step) : void(); }});
  EXPECT_EQ(trained.reports[0].most_lead, bound);
  EXPECT_GE(most_ahead, bound);
  EXPECT_EQ(trained.reports[0].updates, 12);
  expect_replayed(trained, true);
}

// The third worker's gradients of its first step come when the others have gone on without them.
TEST(ServerModes, BackupWorkersGradientsThatComeLateAreDroppedAndCounted) {
  for (const int servers : {1, 3}) {
    SCOPED_TRACE(fmt::format("{} servers", servers));
    Gate others;
    const auto trained = train({.options = {.servers = servers, .backup = 1},
                                .workers = 3,
                                .steps = 6,
                                .before =
                                    [&](int worker, std::int64_t step) {
                                      if (worker == 2 && step == 1) others.await(2);
                                    },
                                .after =
                                    [&](int worker, std::int64_t step) {
                                      if (worker < 2 && step == 1) others.add();
                                    }});
    for (const auto& report : trained.reports) {
      std::int64_t used = 0;
      for (const auto& update : report.updates_kept) used += static_cast<std::int64_t>(update.pushes.size());
      EXPECT_EQ(used + static_cast<std::int64_t>(report.dropped.size()), 3 * 6);
      EXPECT_GE(report.dropped.size(), 1u);
      EXPECT_EQ(report.most_stale, 0);
      const bool first = std::any_of(report.dropped.begin(), report.dropped.end(),
                                     [](const Push& push) { return push.worker == 2 && push.step == 1; });
      EXPECT_TRUE(first);
    }
    for (std::size_t server = 1; server < trained.reports.size(); ++server) {
      const auto& mine = trained.reports[server].updates_kept;
      const auto& firsts = trained.reports[0].updates_kept;
      ASSERT_EQ(mine.size(), firsts.size());
      for (std::size_t at = 0; at < mine.size(); ++at) {
        ASSERT_EQ(mine[at].pushes.size(), firsts[at].pushes.size());
        for (std::size_t push = 0; push < mine[at].pushes.size(); ++push)
          EXPECT_EQ(mine[at].pushes[push].worker, firsts[at].pushes[push].worker) << "update " << at + 1;
      }
    }
    expect_replayed(trained, true);
  }
}

}  // namespace
}  // namespace bonfire::testing::modes_test
