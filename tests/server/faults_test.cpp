// Workers that are gone, and what becomes of the others; requests that cannot be.
#include <csignal>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "bonfire/base/error.h"
#include "bonfire/server/server.h"
#include "bonfire/server/worker.h"
#include "tests/server/gate.h"
#include "tests/shard/twins.h"
#include "tests/support/ranks.h"
#include "tests/support/thrown.h"

namespace bonfire::testing::faults_test {
namespace {

constexpr std::int64_t steps = 6;
constexpr int workers = 3;

at::Tensor loss_of(Chain& net, int worker, std::int64_t step) {
  return net->forward(chain_input(worker, static_cast<int>(step)), {0, 1, 2}).pow(2).mean();
}

std::unique_ptr<Optimizer> make(Shares& shares) { return std::make_unique<AdamW>(shares, AdamOptions{.lr = 0.05}); }

// Where a worker goes, in its step: before it, in the middle of its backward, or when the servers have everything.
enum class Moment { before, within, after };

// Worker 1's lives, as the store knows them.
constexpr const char* lives = "server/worker 1/lives";

struct Gone : std::runtime_error {
  Gone() : std::runtime_error("gone") {}
};

void train_until_gone(World& world, const ServerOptions& options, std::optional<std::pair<std::int64_t, Moment>> goes,
                      std::vector<at::Tensor>* weights) {
  const int me = world.rank() - options.servers;
  Chain net(3);
  Worker worker(world, net, options);
  for (std::int64_t step = worker.steps_before() + 1; step <= steps; ++step) {
    const auto gone = [&](Moment moment) { return goes && goes->first == step && goes->second == moment; };
    if (gone(Moment::before)) throw Gone();
    // When those of the blocks behind it are on their way.
    if (gone(Moment::within)) net->blocks[0]->gain.register_hook([](const at::Tensor&) -> void { throw Gone(); });
    worker.backward(loss_of(net, me, step));
    worker.step();
    if (gone(Moment::after)) throw Gone();
  }
  worker.await();
  if (weights)
    for (const auto& parameter : net->parameters()) weights->push_back(parameter.detach().clone());
  worker.finish();
}

struct Outcome {
  std::vector<ServerReport> reports;
  std::vector<std::vector<at::Tensor>> weights;  // by worker; none where it did not end
  std::vector<std::string> server_errors;
};

// Worker 1 goes, and where `returns` comes back at once.
Outcome run(const ServerOptions& options, std::optional<std::pair<std::int64_t, Moment>> goes, bool returns,
            const std::function<void(World&)>& meanwhile = {}) {
  Outcome outcome;
  outcome.reports.resize(static_cast<std::size_t>(options.servers));
  outcome.server_errors.resize(static_cast<std::size_t>(options.servers));
  outcome.weights.resize(workers);
  run_ranks(options.servers + workers, [&](World& world) {
    const auto me = static_cast<std::size_t>(world.rank());
    if (is_server(world, options)) {
      try {
        Server server(world, options, make);
        outcome.reports[me] = server.serve();
      } catch (const Error& error) {
        outcome.server_errors[me] = error.what();
      }
      return;
    }
    const auto worker = me - static_cast<std::size_t>(options.servers);
    auto* const weights = &outcome.weights[worker];
    if (worker != 1) {
      try {
        train_until_gone(world, options, {}, weights);
      } catch (const Error&) {
        EXPECT_EQ(options.lost, WhenLost::stop);
      }
      return;
    }
    try {
      train_until_gone(world, options, goes, weights);
    } catch (const std::exception& error) {
      EXPECT_STREQ(error.what(), "gone");
      if (meanwhile) meanwhile(world);
      if (returns) train_until_gone(world, options, {}, weights);
    }
  });
  return outcome;
}

constexpr Moment moments[] = {Moment::before, Moment::within, Moment::after};

void expect_same(const std::vector<at::Tensor>& got, const std::vector<at::Tensor>& want) {
  ASSERT_EQ(got.size(), want.size());
  for (std::size_t at = 0; at < got.size(); ++at) EXPECT_TRUE(got[at].equal(want[at])) << "parameter " << at;
}

TEST(ServerFaults, AWorkerThatComesBackGoesOnWhereItWas) {
  for (const int servers : {1, 2}) {
    const ServerOptions options{.servers = servers, .lost = WhenLost::wait, .log = Log::silent()};
    const auto undisturbed = run(options, {}, false);
    for (const auto moment : moments)
      for (const std::int64_t step : {1, 3}) {
        SCOPED_TRACE(fmt::format("{} servers, step {}, moment {}", servers, step, static_cast<int>(moment)));
        const auto disturbed = run(options, std::pair(step, moment), true);
        for (const auto& report : disturbed.reports) EXPECT_EQ(report.updates, steps);
        for (int worker = 0; worker < workers; ++worker)
          expect_same(disturbed.weights[static_cast<std::size_t>(worker)], undisturbed.weights[0]);
      }
  }
}

// It has said that it is there, the servers wait for its connection, and it is gone again.
TEST(ServerFaults, AWorkerThatIsLostWhileItComesBackIsWaitedForAgain) {
  for (const int servers : {1, 2}) {
    SCOPED_TRACE(servers);
    const ServerOptions options{.servers = servers, .lost = WhenLost::wait, .log = Log::silent()};
    const auto undisturbed = run(options, {}, false);
    const auto disturbed = run(options, std::pair(std::int64_t{3}, Moment::within), true, [&](World& world) {
      for (int life = 2; life < 4; ++life) {
        world.store().add(lives, 1);
        for (int server = 0; server < servers; ++server)
          world.store().wait({fmt::format("server/{} to 1/life {}/accepted", server, life)}, std::chrono::seconds(20));
      }
    });
    for (const auto& error : disturbed.server_errors) EXPECT_EQ(error, "");
    for (int worker = 0; worker < workers; ++worker)
      expect_same(disturbed.weights[static_cast<std::size_t>(worker)], undisturbed.weights[0]);
  }
}

// It has said that it has done all, and is gone before the servers have heard it.
TEST(ServerFaults, AWorkerThatHasDoneAllItsStepsIsNotLost) {
  for (const auto lost : {WhenLost::stop, WhenLost::drop, WhenLost::wait}) {
    SCOPED_TRACE(name_of(lost));
    const ServerOptions options{.servers = 2, .lost = lost, .log = Log::silent()};
    run_ranks(2 + 2, [&](World& world) {
      if (is_server(world, options)) {
        Server server(world, options, make);
        const auto report = server.serve();
        EXPECT_EQ(report.updates, steps);
        EXPECT_TRUE(report.lost.empty());
        EXPECT_EQ(server.slowest(), steps);
        return;
      }
      if (world.rank() == 2) return train_until_gone(world, options, {}, nullptr);
      try {
        Chain net(3);
        Worker worker(world, net, options);
        for (std::int64_t step = 1; step <= steps; ++step) {
          worker.backward(loss_of(net, 1, step));
          worker.step();
        }
        worker.await();
        world.store().set("server/worker 1/left", std::to_string(steps));
        throw Gone();
      } catch (const Gone&) {
      }
      if (lost != WhenLost::wait) return;
      Chain net(3);
      Worker worker(world, net, options);
      EXPECT_TRUE(worker.is_back());
      EXPECT_TRUE(worker.has_left());
      EXPECT_EQ(worker.steps_before(), steps);
      expect_part(thrown<Error>([&] { worker.backward(loss_of(net, 1, 1)); }), "a worker that had left");
      worker.finish();
    });
  }
}

TEST(ServerFaults, WhereAllWorkersAreDroppedTheRunEnds) {
  const ServerOptions options{.lost = WhenLost::drop, .log = Log::silent()};
  run_ranks(2, [&](World& world) {
    if (is_server(world, options)) {
      Server server(world, options, make);
      expect_part(thrown<PeerLost>([&] { server.serve(); }), "all 1 workers were lost");
      EXPECT_EQ(server.slowest(), 0);
      return;
    }
    expect_part(thrown<Gone>([&] { train_until_gone(world, options, std::pair(std::int64_t{2}, Moment::before), nullptr); }),
                "gone");
    // Nobody waits for it any more.
    Chain net(3);
    expect_part(thrown<Error>([&] { Worker(world, net, options); }), "server_lost = drop; allowed here: wait");
  });
}

TEST(ServerFaults, AWorkerThatIsDroppedIsNamedWithTheStepThatIsLost) {
  for (const int servers : {1, 2})
    for (const auto mode : {ServerMode::synchronous, ServerMode::bounded})
      for (const auto moment : moments) {
        SCOPED_TRACE(fmt::format("{} servers, mode {}, moment {}", servers, name_of(mode), static_cast<int>(moment)));
        const auto outcome = run({.servers = servers,
                                  .mode = mode,
                                  .staleness = mode == ServerMode::bounded ? 1 : 0,
                                  .lost = WhenLost::drop,
                                  .keep_records = true,
                                  .log = Log::silent()},
                                 std::pair(std::int64_t{3}, moment), false);
        EXPECT_EQ(outcome.weights[0].size(), outcome.weights[2].size());
        EXPECT_TRUE(outcome.weights[1].empty());
        for (const auto& report : outcome.reports) {
          ASSERT_EQ(report.lost.size(), 1u);
          EXPECT_EQ(report.lost[0].worker, 1);
          // What the servers had of the step before may have been used, or not. A backward begins when it has been.
          const std::int64_t before = report.lost[0].step - 3 - (moment == Moment::after ? 1 : 0);
          EXPECT_TRUE(before == 0 || (before == -1 && moment != Moment::within)) << report.lost[0].step;
          std::int64_t last = 0;
          for (const auto& update : report.updates_kept)
            for (const auto& push : update.pushes)
              if (push.worker == 1) last = push.step;
          EXPECT_EQ(last + 1, report.lost[0].step);
        }
        for (const auto& report : outcome.reports)
          if (mode == ServerMode::synchronous) {
            EXPECT_EQ(report.updates, steps);
          }
      }
}

TEST(ServerFaults, AWorkerThatIsGoneEndsTheRunUnlessSaidOtherwise) {
  for (const auto moment : moments) {
    const auto outcome = run({.servers = 2, .log = Log::silent()}, std::pair(std::int64_t{2}, moment), false);
    for (const auto& error : outcome.server_errors)
      EXPECT_TRUE(error.find("worker 1 (rank 3) was lost") != std::string::npos ||
                  error.find("the run ends") != std::string::npos)
          << error;
    EXPECT_TRUE(outcome.server_errors[0].find("worker 1 (rank 3) was lost") != std::string::npos ||
                outcome.server_errors[1].find("worker 1 (rank 3) was lost") != std::string::npos)
        << outcome.server_errors[0];
  }
}

TEST(ServerFaults, AServerThatIsGoneIsNamedToItsWorkers) {
  for (const int gone : {0, 1}) {
    const ServerOptions options{.servers = 2, .log = Log::silent()};
    std::string said;
    run_ranks(3, [&](World& world) {
      if (is_server(world, options)) {
        Server server(world, options, make);
        // The other one serves until it hears that the worker is gone, too.
        if (world.rank() != gone) {
          EXPECT_FALSE(thrown<std::exception>([&] { server.serve(); }).empty());
        }
        return;
      }
      said = thrown<PeerLost>([&] {
        Chain net(3);
        Worker worker(world, net, options);
        for (std::int64_t step = 1; step <= steps; ++step) {
          worker.backward(loss_of(net, 0, step));
          worker.step();
        }
        worker.await();
      });
    });
    expect_part(said, fmt::format("server {0} (rank {0}) was lost", gone));
    EXPECT_EQ(said.find('\n'), std::string::npos) << said;
  }
}

// The second server has not updated a single Unit with the lost worker's last gradients when that is back; the first has.
TEST(ServerFaults, AWorkerThatComesBackFindsWeightsOfOneVersion) {
  const ServerOptions undisturbed_options{.servers = 2, .lost = WhenLost::wait, .log = Log::silent()};
  const auto undisturbed = run(undisturbed_options, {}, false);
  auto options = undisturbed_options;
  Gate updated, back;
  std::mutex mutex;
  std::vector<ServerReport> reports(2);
  std::vector<std::vector<at::Tensor>> weights(workers);
  run_ranks(2 + workers, [&](World& world) {
    auto mine = options;
    if (world.rank() == 0)
      mine.after_update = [&](const ServerUpdate& update) {
        if (update.update == 3) updated.add();
        return std::int64_t{0};
      };
    if (world.rank() == 1)
      mine.before_update = [&](Optimizer&, std::int64_t update) {
        if (update == 2) {
          EXPECT_TRUE(back.await(1));
        }
      };
    if (is_server(world, mine)) {
      Server server(world, mine, make);
      auto report = server.serve();
      const std::lock_guard lock(mutex);
      reports[static_cast<std::size_t>(world.rank())] = std::move(report);
      return;
    }
    const int me = world.rank() - 2;
    auto* const result = &weights[static_cast<std::size_t>(me)];
    if (me != 1) return train_until_gone(world, options, {}, result);
    const auto die = [&] {
      Chain net(3);
      Worker worker(world, net, options);
      for (std::int64_t step = 1; step <= 3; ++step) {
        worker.backward(loss_of(net, me, step));
        worker.step();
      }
      EXPECT_TRUE(updated.await(1));
      throw Gone();
    };
    EXPECT_THROW(die(), Gone);
    // The second server goes on when this worker has asked to be connected again.
    const std::jthread release([&] {
      while (world.store().add("server/worker 1/lives", 0) < 2) std::this_thread::yield();
      back.add();
    });
    train_until_gone(world, options, {}, result);
  });
  for (const auto& report : reports) {
    EXPECT_EQ(report.updates, steps);
    EXPECT_TRUE(report.dropped.empty());
  }
  for (const auto& of : weights) expect_same(of, undisturbed.weights[0]);
}

// Writing to a connection whose other end is gone must not end the process, where the program has not asked for that.
TEST(ServerFaults, TheSignalOfAConnectionThatIsGoneIsOutlived) {
  struct sigaction at_first {
  }, usual{}, own{};
  usual.sa_handler = SIG_DFL;
  own.sa_handler = [](int) {};
  const auto after = [](const struct sigaction& before) {
    sigaction(SIGPIPE, &before, nullptr);
    run({.log = Log::silent()}, {}, false);
    struct sigaction now {};
    sigaction(SIGPIPE, nullptr, &now);
    return now.sa_handler;
  };
  sigaction(SIGPIPE, nullptr, &at_first);
  const auto of_usual = after(usual), of_own = after(own);
  sigaction(SIGPIPE, &at_first, nullptr);
  EXPECT_NE(of_usual, SIG_DFL);
  EXPECT_NE(of_usual, SIG_IGN) << "programs started from this one would inherit that";
  EXPECT_EQ(of_own, own.sa_handler);
}

TEST(ServerFaults, RequestsThatCannotBeAreRefused) {
  const auto refused = [](ServerOptions options, int ranks, const char* words) {
    expect_part(thrown<ConfigError>([&] { require_servers(options, ranks); }), words);
  };
  refused({.servers = 4}, 4, "4 servers of 4 ranks");
  refused({.servers = 0}, 4, "0 servers of 4 ranks");
  refused({.mode = ServerMode::bounded, .staleness = -1}, 4, "staleness is -1; allowed: 0 or more");
  refused({.staleness = 2}, 4, "staleness is 2 in synchronous mode");
  refused({.backup = 3}, 4, "3 backup workers of 3");
  refused({.mode = ServerMode::asynchronous, .backup = 1}, 4, "1 backup workers in asynchronous mode");
  refused({.compression = plan::Compression::powersgd}, 4, "compression powersgd with a parameter server");
  refused({.mode = ServerMode::bounded, .pulled = Pulled::gradients}, 4, "workers that pull gradients");
  refused({.clip = -1}, 4, "clip is -1");
  run_ranks(2, [&](World& world) {
    if (world.rank() == 0) return;
    Chain net(1);
    expect_part(thrown<Error>([&] { Server(world, {}, make); }), "rank 1 of 2 is a worker");
    for (const auto what : {Sharded::optimizer, Sharded::gradients, Sharded::parameters})
      expect_part(thrown<ConfigError>([&] { Worker(world, net, {}, {.what = what}); }),
                  fmt::format("{} sharded beside a parameter server", plan::name_of(what)));
    expect_part(
        thrown<ConfigError>([&] { Worker(world, net, {}, {.reduction = {.compression = plan::Compression::bf16}}); }),
        "say ServerOptions::compression");
    expect_part(thrown<ConfigError>([&] { Worker(world, net, {}, {.offload = Offload::optimizer}); }), "offload");
  });
}

}  // namespace
}  // namespace bonfire::testing::faults_test
