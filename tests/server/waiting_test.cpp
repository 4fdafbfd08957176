// Who waits for whom: a forward for its Unit's weights and no others, and other workers for a slow one as far as the mode
// says.
#include <atomic>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string_view>
#include <vector>

#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include "bonfire/server/server.h"
#include "bonfire/server/worker.h"
#include "tests/server/gate.h"
#include "tests/shard/twins.h"
#include "tests/support/ranks.h"

namespace bonfire::testing::waiting_test {
namespace {

struct ThinImpl : torch::nn::Module {
  explicit ThinImpl(std::int64_t in, std::int64_t out) : linear(register_module("linear", torch::nn::Linear(in, out))) {}
  at::Tensor forward(const at::Tensor& x) { return linear->forward(x); }
  torch::nn::Linear linear;
};
BONFIRE_UNIT(Thin);

constexpr std::int64_t last_elements = 30 * 20;

// Three Units; the last is the largest.
struct StackImpl : torch::nn::Module {
  StackImpl()
      : first(register_module("first", Thin(4, 5))),
        second(register_module("second", Thin(5, 20))),
        third(register_module("third", Thin(20, 30))) {
    initialise(*this);
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto y = first->forward(x);
    if (after_first) after_first();
    return third->forward(second->forward(y));
  }
  Thin first, second, third;
  std::function<void()> after_first;
};
BONFIRE_UNIT(Stack);

// Gradient descent that says when the largest Unit's turn has come.
class Descent final : public Optimizer {
 public:
  Descent(Shares& shares, std::function<void()> before_last)
      : Optimizer(shares, {.lr = 0.1}, {}), before_last_(std::move(before_last)) {}

 private:
  void update(std::span<const Range> ranges) override {
    for (const auto& range : ranges) {
      if (range.master.numel() >= last_elements) before_last_();
      range.master.sub_(range.gradient, range.lr * range.gradient_scale);
    }
  }
  std::function<void()> before_last_;
};

// The last Unit's update ends when the first Unit's next forward has run: that has the new weights by then.
TEST(ServerWaiting, TheFirstUnitsForwardRunsWhileTheLastIsUpdated) {
  const ServerOptions options{};
  Gate forwards;
  constexpr int steps = 3;
  run_ranks(2, [&](World& world) {
    if (is_server(world, options)) {
      int updates = 0;
      Server server(world, options, [&](Shares& shares) {
        return std::make_unique<Descent>(shares, [&] {
          ++updates;
          // After the last there is no forward.
          if (updates < steps) {
            EXPECT_TRUE(forwards.await(updates + 1)) << "update " << updates;
          }
        });
      });
      server.serve();
      EXPECT_EQ(updates, steps);
      return;
    }
    Stack net, alone;
    net->after_first = [&] { forwards.add(); };
    Worker worker(world, net, options);
    for (int step = 0; step < steps; ++step) {
      const auto x = numbers({3, 4}, static_cast<std::uint64_t>(step));
      worker.backward(net->forward(x).pow(2).mean());
      worker.step();
      alone->zero_grad();
      alone->forward(x).pow(2).mean().backward();
      const at::NoGradGuard no_grad;
      for (auto& parameter : alone->parameters()) parameter.sub_(parameter.grad(), 0.1);
    }
    worker.await();
    for (std::size_t at = 0; at < net->parameters().size(); ++at)
      EXPECT_LE((net->parameters()[at] - alone->parameters()[at]).abs().max().item<double>(), 1e-12);
    worker.finish();
  });
}

// Worker 0 does not begin its first step before `held` returns. The others tell what they have begun and ended, and servers
// each update.
struct Straggling {
  ServerOptions options{};
  std::function<void()> held;
  Gate begun, ended, updates;
};
constexpr int workers = 3, straggling_steps = 6;

std::vector<ServerReport> run(Straggling& how) {
  how.options.keep_records = true;
  how.options.after_update = [&](const ServerUpdate&) {
    how.updates.add();
    return std::int64_t{0};
  };
  std::vector<ServerReport> reports(static_cast<std::size_t>(how.options.servers));
  run_ranks(how.options.servers + workers, [&](World& world) {
    if (is_server(world, how.options)) {
      Server server(world, how.options, [](Shares& shares) { return std::make_unique<Sgd>(shares); });
      reports[static_cast<std::size_t>(world.rank())] = server.serve();
      return;
    }
    const int me = world.rank() - how.options.servers;
    Stack net;
    Worker worker(world, net, how.options);
    for (int step = 1; step <= straggling_steps; ++step) {
      if (me == 0 && step == 1) how.held();
      if (me > 0) how.begun.add();
      worker.backward(net->forward(numbers({3, 4}, static_cast<std::uint64_t>(10 * step + me))).pow(2).mean());
      worker.step();
      worker.await();
      if (me > 0) how.ended.add();
    }
    worker.finish();
  });
  return reports;
}

// A while in which nothing should happen: what does anyway fails the test, if it is quick enough.
constexpr std::chrono::milliseconds a_while{300};

TEST(ServerWaiting, NobodyWaitsForAStragglerInAsynchronousMode) {
  for (const int servers : {1, 2}) {
    Straggling how{.options = {.servers = servers, .mode = ServerMode::asynchronous}};
    how.held = [&] { EXPECT_TRUE(how.ended.await((workers - 1) * straggling_steps)); };
    for (const auto& report : run(how)) EXPECT_EQ(report.updates, workers * straggling_steps);
  }
}

TEST(ServerWaiting, NobodyWaitsForAStragglerWhereThereIsABackup) {
  for (const int servers : {1, 2}) {
    Straggling how{.options = {.servers = servers, .backup = 1}};
    how.held = [&] { EXPECT_TRUE(how.ended.await((workers - 1) * straggling_steps)); };
    for (const auto& report : run(how)) {
      EXPECT_GE(report.updates, straggling_steps);
      EXPECT_GE(report.dropped.size(), 1u);
    }
  }
}

TEST(ServerWaiting, ABoundLetsTheOthersGoAheadOfAStragglerSoFarAndNoFurther) {
  for (const int servers : {1, 2})
    for (const int bound : {0, 2}) {
      SCOPED_TRACE(fmt::format("{} servers, staleness {}", servers, bound));
      Straggling how{.options = {.servers = servers, .mode = ServerMode::bounded, .staleness = bound}};
      // Each of the others begins a step when it is ahead by the bound, and its gradients are used.
      const int ahead = bound + 1;
      how.held = [&] {
        EXPECT_TRUE(how.updates.await(servers * (workers - 1) * ahead));
        EXPECT_FALSE(how.begun.await((workers - 1) * ahead + 1, a_while)) << how.begun.count();
        EXPECT_EQ(how.ended.count(), (workers - 1) * bound);
      };
      for (const auto& report : run(how)) {
        ASSERT_EQ(report.updates, workers * straggling_steps);
        EXPECT_EQ(report.most_lead, bound);
        for (int at = 0; at < (workers - 1) * ahead; ++at)
          EXPECT_NE(report.updates_kept[static_cast<std::size_t>(at)].pushes.front().worker, 0) << at;
      }
    }
}

TEST(ServerWaiting, AllWaitForAStragglerInSynchronousMode) {
  for (const int servers : {1, 2}) {
    Straggling how{.options = {.servers = servers}};
    how.held = [&] {
      EXPECT_TRUE(how.begun.await(workers - 1));
      EXPECT_FALSE(how.updates.await(1, a_while));
      EXPECT_EQ(how.ended.count(), 0);
    };
    for (const auto& report : run(how)) EXPECT_EQ(report.updates, straggling_steps);
  }
}

// Worker 1 is ahead by more than the bound, so it is not answered, and is gone; worker 0 goes on only when it is back. It
// does not begin a step before worker 0 has caught up.
TEST(ServerWaiting, AWorkerThatIsLostWhileItWaitsForOthersComesBackToWaitForThem) {
  constexpr std::int64_t steps = 4, ahead = 2;
  for (const int servers : {1, 2}) {
    SCOPED_TRACE(servers);
    Gate taken, back;
    std::atomic<bool> goes_on{false};
    ServerOptions options{.servers = servers, .mode = ServerMode::bounded, .staleness = 1, .lost = WhenLost::wait};
    options.after_update = [&](const ServerUpdate& update) {
      if (update.pushes.front().worker == 1 && update.pushes.front().step == ahead) taken.add();
      return std::int64_t{0};
    };
    options.log = Log([&](LogLevel, std::string_view words) {
      if (words.find("is back after 2 steps") != words.npos) back.add();
    });
    std::vector<ServerReport> reports(static_cast<std::size_t>(servers));
    run_ranks(servers + 2, [&](World& world) {
      if (is_server(world, options)) {
        Server server(world, options, [](Shares& shares) { return std::make_unique<Sgd>(shares); });
        reports[static_cast<std::size_t>(world.rank())] = server.serve();
        return;
      }
      const int me = world.rank() - servers;
      const auto train = [&](std::int64_t last, bool finish) {
        Stack net;
        Worker worker(world, net, options);
        if (me == 0) {
          EXPECT_TRUE(back.await(servers));
          goes_on = true;
        }
        if (finish) {
          EXPECT_TRUE(goes_on);
        }
        for (auto step = worker.steps_before() + 1; step <= last; ++step) {
          worker.backward(net->forward(numbers({3, 4}, static_cast<std::uint64_t>(10 * step + me))).pow(2).mean());
          worker.step();
        }
        if (finish) return worker.finish();
        EXPECT_TRUE(taken.await(servers));
        throw std::runtime_error("gone");
      };
      if (me == 1) {
        EXPECT_THROW(train(ahead, false), std::runtime_error);
      }
      train(steps, true);
    });
    for (const auto& report : reports) {
      EXPECT_EQ(report.updates, 2 * steps);
      EXPECT_LE(report.most_lead, 1);
    }
  }
}

}  // namespace
}  // namespace bonfire::testing::waiting_test
