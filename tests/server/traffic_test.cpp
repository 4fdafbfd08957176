// Messages and memory beside the plan's arithmetic, and beside data parallelism's.
#include <algorithm>
#include <cmath>
#include <vector>

#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include "bonfire/plan/server.h"
#include "bonfire/server/server.h"
#include "bonfire/server/worker.h"
#include "bonfire/shard/engine.h"
#include "bonfire/shard/flat_parameter.h"
#include "tests/shard/twins.h"
#include "tests/support/rank_memory.h"
#include "tests/support/ranks.h"

namespace bonfire::testing::traffic_test {
namespace {

constexpr std::int64_t width = 96;

struct WideImpl : torch::nn::Module {
  WideImpl() : linear(register_module("linear", torch::nn::Linear(width, width))) {}
  at::Tensor forward(const at::Tensor& x) { return x + linear->forward(x).tanh(); }
  torch::nn::Linear linear;
};
BONFIRE_UNIT(Wide);

struct NetImpl : torch::nn::Module {
  NetImpl() {
    for (int at = 0; at < 3; ++at) blocks.push_back(register_module(fmt::format("block{}", at), Wide()));
    to(at::kDouble);
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& block : blocks) x = block->forward(x);
    return x;
  }
  std::vector<Wide> blocks;
};
BONFIRE_UNIT(Net);

// As the module says it: three Units of a matrix and a bias.
std::vector<plan::FlatLayout> flats(const plan::Served& how, plan::Dtype compute = plan::Dtype::fp64,
                                    plan::Dtype master = plan::Dtype::fp64) {
  std::vector<plan::ParameterGroup> groups;
  for (int at = 2; at >= 0; --at) {
    const auto size = [&](const char* name, std::vector<std::int64_t> shape, std::int64_t elements) {
      return plan::ParameterSize{
          .name = fmt::format("block{}.linear.{}", at, name), .elements = elements, .shape = std::move(shape)};
    };
    groups.push_back(
        {fmt::format("block{}", at), {size("weight", {width, width}, width * width), size("bias", {width}, width)}});
  }
  plan::DataParallel layout{.compute = compute, .master = master, .gradient = how.gradient};
  layout.buckets.parts = how.servers;
  layout.buckets.one_per_group = true;
  return plan::flats_of(groups, layout);
}

at::Tensor loss_of(Net& net, int worker, int step) {
  const auto type = net->blocks[0]->linear->weight.scalar_type();
  return net->forward(numbers({4, width}, static_cast<std::uint64_t>(100 * step + worker), type)).pow(2).mean();
}

TEST(ServerTraffic, IsWhatThePlanSays) {
  for (const int servers : {1, 3})
    for (const auto compression : {plan::Compression::none, plan::Compression::bf16}) {
      SCOPED_TRACE(fmt::format("{} servers, compression {}", servers, static_cast<int>(compression)));
      const plan::Served how{.workers = 2,
                             .servers = servers,
                             .gradient = plan::Dtype::fp64,
                             .compression = compression,
                             .optimizer_states = 2};
      const auto planned = flats(how);
      const ServerOptions options{.servers = servers, .compression = compression};
      run_ranks(servers + 2, [&](World& world) {
        if (is_server(world, options)) {
          Server server(world, options, [](Shares& shares) { return std::make_unique<Adam>(shares); });
          for (int worker = 0; worker < 2; ++worker) server.recorder(worker).start();
          server.serve();
          EXPECT_EQ(server.bytes(), plan::server_state_bytes(planned, how));
          // The last step's, before the word that the worker leaves.
          const auto expected = plan::messages_of_server(planned, how);
          for (int worker = 0; worker < 2; ++worker) {
            auto all = server.recorder(worker).collectives();
            ASSERT_GT(all.size(), expected.size());
            all.pop_back();
            EXPECT_EQ(std::vector(all.end() - static_cast<std::ptrdiff_t>(expected.size()), all.end()), expected)
                << "worker " << worker;
          }
          return;
        }
        Net net;
        Worker worker(world, net, options);
        for (int step = 0; step < 3; ++step) {
          for (int server = 0; server < servers; ++server) {
            worker.recorder(server).clear();
            worker.recorder(server).start();
          }
          worker.backward(loss_of(net, world.rank(), step));
          worker.step();
          worker.await();
          // The first backward teaches the order of the buffers.
          if (step == 0) continue;
          for (int server = 0; server < servers; ++server)
            EXPECT_EQ(worker.recorder(server).collectives(), plan::messages_of_worker(planned, how)) << "step " << step;
        }
        // Twice the weights, and nothing of an optimizer.
        std::int64_t moved = 0, weights = 0;
        for (const auto& message : plan::messages_of_worker(planned, how)) moved += message.bytes * servers;
        for (const auto& parameter : net->parameters()) weights += static_cast<std::int64_t>(parameter.nbytes());
        if (compression == plan::Compression::none) {
          EXPECT_NEAR(static_cast<double>(moved) / static_cast<double>(weights), 2, 0.04);
        }
        worker.finish();
      });
    }
}

// Weights in bf16 over masters in fp32, and gradients in either: what is pulled has the weights' bytes or the gradients'.
TEST(ServerTraffic, TypesAndWhatIsPulledDecideTheBytes) {
  for (const int servers : {1, 3})
    for (const auto gradient : {plan::Dtype::fp32, plan::Dtype::bf16})
      for (const auto pulled : {Pulled::weights, Pulled::gradients}) {
        SCOPED_TRACE(fmt::format("{} servers, gradients in {}, {} are pulled", servers, plan::name_of(gradient),
                                 pulled == Pulled::weights ? "weights" : "gradients"));
        const plan::Served how{.workers = 2,
                               .servers = servers,
                               .gradient = gradient,
                               .optimizer_states = 2,
                               .pulls_gradients = pulled == Pulled::gradients};
        const auto planned = flats(how, plan::Dtype::bf16, plan::Dtype::fp32);
        const ServerOptions options{.servers = servers, .pulled = pulled};
        const auto make = [](Shares& shares) { return std::make_unique<Adam>(shares); };
        std::vector<at::Tensor> weights(2);
        run_ranks(servers + 2, [&](World& world) {
          if (is_server(world, options)) {
            Server server(world, options, make);
            server.serve();
            EXPECT_EQ(server.bytes(), plan::server_state_bytes(planned, how));
            return;
          }
          Net net;
          net->to(at::kFloat);
          const Precision precision{.parameters = at::kBFloat16,
                                    .gradients = gradient == plan::Dtype::bf16 ? at::kBFloat16 : at::kFloat};
          Worker worker(world, net, options, {.precision = precision});
          std::unique_ptr<Optimizer> own;
          if (pulled == Pulled::gradients) own = make(worker.engine());
          for (int step = 0; step < 3; ++step) {
            for (int server = 0; server < servers; ++server) {
              worker.recorder(server).clear();
              worker.recorder(server).start();
            }
            worker.backward(loss_of(net, world.rank(), step));
            own ? static_cast<void>(own->step()) : worker.step();
            worker.await();
            if (step == 0) continue;
            for (int server = 0; server < servers; ++server)
              EXPECT_EQ(worker.recorder(server).collectives(), plan::messages_of_worker(planned, how)) << "step " << step;
          }
          weights[static_cast<std::size_t>(world.rank() - servers)] = net->blocks[0]->linear->weight.detach().clone();
          worker.finish();
        });
        EXPECT_TRUE(weights[0].equal(weights[1]));
      }
}

// What a rank holds at the end of a step, and at most during one.
struct Held {
  std::int64_t settled = 0, peak = 0;
};

// Weights, gradients and AdamW's state of a data-parallel rank are weights and gradients on a worker; its server has all but
// the activations.
TEST(ServerTraffic, WorkersHoldNoOptimizerStateAndServersNoActivations) {
  constexpr int ranks = 2, steps = 4;
  // As long as a batch of the others is wide: activations weigh as much as a Unit.
  const auto loss = [](Net& net, int rank, int step) {
    return net->forward(numbers({width, width}, static_cast<std::uint64_t>(100 * step + rank))).pow(2).mean();
  };
  std::int64_t weights = 0, reduced = 0, exchanged = 0;
  Held replica, worker, server;
  run_ranks(ranks, [&](World& world) {
    RankMemory memory;
    Net net;
    auto engine = shard(world.mesh({.replicate = ranks}), net);
    AdamW optimizer(engine);
    Held mine;
    for (int step = 0; step < steps; ++step) {
      if (step == steps - 1) world.recorder().start();
      memory.peak();
      engine.backward(loss(net, world.rank(), step));
      optimizer.step();
      mine = {memory.current(), memory.peak()};
    }
    if (world.rank() > 0) return;
    replica = mine;
    for (const auto& collective : world.recorder().collectives())
      if (collective.kind == CollectiveKind::all_reduce)
        reduced += std::llround(static_cast<double>(collective.bytes) * bus_factor(CollectiveKind::all_reduce, ranks));
    for (const auto& parameter : net->parameters()) weights += static_cast<std::int64_t>(parameter.nbytes());
  });
  const ServerOptions options{};
  run_ranks(1 + ranks, [&](World& world) {
    RankMemory memory;
    if (is_server(world, options)) {
      Server serves(world, options, [](Shares& shares) { return std::make_unique<AdamW>(shares); });
      serves.serve();
      server = {memory.current(), memory.peak()};
      return;
    }
    Net net;
    Worker works(world, net, options);
    Held mine;
    for (int step = 0; step < steps; ++step) {
      if (step == steps - 1) works.recorder(0).start();
      memory.peak();
      works.backward(loss(net, world.rank() - 1, step));
      works.step();
      works.await();
      mine = {memory.current(), memory.peak()};
    }
    if (world.rank() == 1) {
      worker = mine;
      for (const auto& message : works.recorder(0).collectives()) exchanged += message.bytes;
    }
    works.finish();
  });
  const auto times = [&](std::int64_t bytes) { return fmt::format("{:.2f} P", 1.0 * bytes / weights); };
  fmt::print(
      "| P = {} bytes | held between steps | at the peak | sent and received in a step |\n|---|---|---|---|\n"
      "| data-parallel rank | {} | {} | {} |\n| worker | {} | {} | {} |\n| server of {} workers | {} | {} | {} |\n",
      weights, times(replica.settled), times(replica.peak), times(2 * reduced), times(worker.settled), times(worker.peak),
      times(exchanged), ranks, times(server.settled), times(server.peak), times(ranks * exchanged));
  const auto near = [&](std::int64_t got, double times) { EXPECT_NEAR(1.0 * got / weights, times, 0.1 * times); };
  // Weights, gradients, and two numbers for each; what replicas exchange takes memory, too.
  EXPECT_GE(replica.settled, 4 * weights);
  near(worker.settled, 2);          // weights, gradients
  near(server.settled, 4 + ranks);  // all of these, and gradients of each worker
  near(reduced, 2.0 * (ranks - 1) / ranks);
  near(exchanged, 2);
  // Activations are what a step needs beyond that, on a worker and not on a server.
  EXPECT_GT(worker.peak - worker.settled, weights);
  EXPECT_LE(worker.peak, replica.peak - 1.8 * weights);
  EXPECT_LT(server.peak - server.settled, weights / 10);
}

// The first Unit's backward finds the gradients of those behind it sent.
TEST(ServerTraffic, GradientsLeaveWhileBackwardRuns) {
  const ServerOptions options{};
  run_ranks(2, [&](World& world) {
    if (is_server(world, options)) {
      Server server(world, options, [](Shares& shares) { return std::make_unique<Sgd>(shares); });
      server.serve();
      return;
    }
    Net net;
    Worker worker(world, net, options);
    worker.recorder(0).start();
    auto x = numbers({4, width}, 1).requires_grad_(true);
    auto first = net->blocks[0]->forward(x);
    std::size_t sent = 0;
    first.register_hook([&](const at::Tensor&) { sent = worker.recorder(0).records().size(); });
    worker.backward(net->blocks[2]->forward(net->blocks[1]->forward(first)).pow(2).mean());
    EXPECT_EQ(sent, 2u);
    worker.step();
    worker.finish();
  });
}

// The tensors are cut so that all servers hold the same, to a twentieth.
TEST(ServerTraffic, ServersHoldEqualParts) {
  for (const int servers : {2, 3, 7}) {
    for (const auto& flat : flats({.servers = servers}))
      for (const auto& region : flat.regions) EXPECT_EQ(region.elements % (servers * plan::segment_alignment), 0);
    std::vector<std::int64_t> held(static_cast<std::size_t>(servers));
    for (const auto& flat : flats({.servers = servers}))
      for (const auto& segment : flat.segments)
        for (int server = 0; server < servers; ++server) {
          const auto length = flat.regions[segment.region].elements / servers;
          const auto begin = std::max(segment.offset, server * length);
          const auto end = std::min(segment.offset + segment.elements, (server + 1) * length);
          held[static_cast<std::size_t>(server)] += std::max<std::int64_t>(0, end - begin);
        }
    const double mean = static_cast<double>(3 * (width * width + width)) / servers;
    for (const auto one : held) EXPECT_LE(static_cast<double>(one), 1.05 * mean) << servers << " servers";
  }
}

TEST(ServerTraffic, PredictedStepsFollowFromTheLinks) {
  using plan::served_step_seconds;
  plan::ServedCosts costs;
  for (int unit = 0; unit < 4; ++unit)
    costs.units.push_back({.forward = 1, .backward = 2, .push = 0.25, .pull = 0.25, .update = 0});
  // Alone: the last gradient and the first weights are what nothing hides.
  EXPECT_NEAR(served_step_seconds(costs, {.workers = 1}), 12.5, 1e-9);
  // So many that the server's card is busy all the time: with pushes first, then with answers. Those to the first worker end
  // one Unit's round before the last.
  const double many = served_step_seconds(costs, {.workers = 64});
  EXPECT_GE(many, 64 * 4 * 0.25 + 64 * 3 * 0.25);
  EXPECT_LE(many, 64 * 4 * 0.25 * 2 + 12);
  // Twice as many servers carry half each.
  auto halves = costs;
  for (auto& unit : halves.units) unit.push /= 2, unit.pull /= 2;
  // Of two servers each gets its half of the last gradient in turn, 0.125 after the other, and both update then: their
  // answers for the first Unit share the worker's card, 0.125 each.
  EXPECT_NEAR(served_step_seconds(halves, {.workers = 1, .servers = 2}), 12 + 2 * 0.125 + 2 * 0.125, 1e-9);
  const double two = served_step_seconds(halves, {.workers = 64, .servers = 2});
  EXPECT_NEAR(two, many / 2, 12);
  // Where nobody waits for the others, nothing takes longer.
  EXPECT_LE(served_step_seconds(costs, {.workers = 8}, false), served_step_seconds(costs, {.workers = 8}) + 1e-9);
}

}  // namespace
}  // namespace bonfire::testing::traffic_test
