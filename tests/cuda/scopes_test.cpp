// What sharding promises beside equal weights, over NCCL: ranks share the GPUs there are.
#include <gtest/gtest.h>

#include <optional>

#include <ATen/ATen.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>

#include "bonfire/comm/device.h"
#include "bonfire/models/model.h"
#include "bonfire/shard/build_scope.h"
#include "bonfire/train/loop.h"
#include "bonfire/train/memory.h"
#include "tests/shard/twins.h"
#include "tests/support/build_peak.h"
#include "tests/support/gpu_ranks.h"
#include "tests/support/shell.h"
#include "tests/support/tiny_training.h"

namespace bonfire::scopes_test {
namespace {

using testing::Chain;
using testing::Order;
using testing::relative_distance;
using testing::run_gpu_ranks;
using testing::Sharding;
using testing::tiny_data;
using testing::tiny_models;
using testing::train_tiny;

constexpr std::int64_t mebibyte = 1 << 20;

TEST(GpuMemoryCap, RefusesWhatPassesIt) {
  BONFIRE_SKIP_WITHOUT_GPU();
  const c10::Device gpu(c10::kCUDA, 0);
  const MemoryMeter meter(gpu);
  const auto bytes = [&](std::int64_t count) { return at::empty({count}, at::TensorOptions(at::kByte).device(gpu)); };
  {
    const MemoryCap cap(gpu, 256 * mebibyte);
    const auto fits = bytes(128 * mebibyte);
    EXPECT_THROW(bytes(512 * mebibyte), c10::OutOfMemoryError);
    EXPECT_LT(meter.current(), 256 * mebibyte);
  }
  EXPECT_NO_THROW(bytes(512 * mebibyte));
}

// How a run of two ranks ends that may have 960 MiB on each: 67 million parameters with 16 bytes for each are a gigabyte.
// Each rank has a folder of its own here, so nothing is saved.
std::string end_of_run(World& world, const std::vector<std::string>& layout) {
  const testing::Folder folder;
  std::vector<std::string> overrides = {"run.device=cuda", "run.memory_cap=960MiB", "checkpoint.every=0"};
  overrides.insert(overrides.end(), layout.begin(), layout.end());
  Config config = parse_config(
      "[model]\ndim = 512\nlayers = 16\nheads = 8\nvocab = 512\n[data]\nsequence = 16\n[train]\nsteps = 2\nbatch = 2\n",
      "a.toml", overrides);
  resolve(config, 2);
  std::string end = "trained";
  try {
    train(world, config, {.folder = folder.path()});
  } catch (const Error& error) {
    end = error.what();
  }
  return end;
}

TEST(GpuMemoryCap, ARunThatPassesItSaysWhatWouldFit) {
  BONFIRE_SKIP_WITHOUT_GPU();
  run_gpu_ranks(2, [](World& world) {
    const auto end = end_of_run(world, {});
    for (const char* words :
         {"out of memory: ", "was predicted to need", "layout.shard = 2 with layout.sharded = ", " would fit: "})
      EXPECT_NE(end.find(words), std::string::npos) << end;
  });
}

TEST(GpuMemoryCap, ShardingTrainsWhatDataParallelismCannotHold) {
  BONFIRE_SKIP_WITHOUT_GPU();
  run_gpu_ranks(2, [](World& world) { EXPECT_EQ(end_of_run(world, {"layout.shard=2"}), "trained"); });
}

class GpuScopes : public ::testing::TestWithParam<int> {};

// A build needs the shares and one Unit on the GPU too; torch gives memory there in steps of 512 bytes.
TEST_P(GpuScopes, ABuildNeedsTheSharesAndOneUnit) {
  BONFIRE_SKIP_WITHOUT_GPU();
  run_gpu_ranks(GetParam(), [](World& world) {
    const int ranks = world.size();
    auto spec = tiny_models()[3].spec;
    spec.layers = 8;
    spec.dim = 64;
    spec.ffn = 128;
    const auto description = plan::describe(spec);
    const plan::DataParallel layout{.shard = ranks, .what = Sharded::parameters};
    const ShardOptions options{.what = Sharded::parameters};
    const Mesh mesh = world.mesh({.shard = ranks});
    mesh.group(Axis::data).sum(1);  // connects
    std::int64_t tensors = 0;
    for (const auto& unit : description.units) tensors += static_cast<std::int64_t>(unit.parameters.size()) + 4;
    const MemoryMeter meter(world.device());
    std::optional<Build> scope(std::in_place, mesh, options);
    auto model = build_model(spec, {.seed = 5, .device = world.device()});
    scope.reset();
    EXPECT_LE(meter.peak(),
              testing::peak_of_build(description, layout) + testing::fingerprints(description, ranks) + 512 * tensors);
    Engine engine = shard(mesh, *model, options);
    const auto whole = engine.full_parameters();
    const auto alone = build_model(spec, {.seed = 5});
    const auto mine = model->named_parameters();
    for (const auto& item : alone->named_parameters())
      EXPECT_TRUE(at::equal(mine[item.key()].cpu(), item.value())) << item.key();
  });
}

TEST_P(GpuScopes, DebuggingChangesNothing) {
  BONFIRE_SKIP_WITHOUT_GPU();
  make_deterministic();
  run_gpu_ranks(GetParam(), [](World& world) {
    for (const std::size_t model : {2u, 3u})
      for (const bool free : {true, false}) {
        testing::TinyRun run{.spec = tiny_models()[model].spec,
                             .factor = world.size(),
                             .options = {.what = Sharded::parameters, .reshard_after_forward = free}};
        const auto plain = train_tiny(world, run);
        run.options.debug = true;
        const auto debugged = train_tiny(world, run);
        EXPECT_EQ(debugged.losses, plain.losses);
        EXPECT_TRUE(at::equal(debugged.weights, plain.weights));
      }
  });
}

// Without gradients, between steps and before the first one: the loss is that of one CPU rank.
TEST_P(GpuScopes, EvaluationIsThatOfOneRank) {
  BONFIRE_SKIP_WITHOUT_GPU();
  make_deterministic();
  run_gpu_ranks(GetParam(), [](World& world) {
    at::globalContext().setUserEnabledCuDNN(false);  // as GpuLaws says
    for (const auto& [name, spec] : tiny_models()) {
      if (spec.dropout > 0) continue;
      SCOPED_TRACE(name);
      auto model = build_model(spec, {.seed = 5, .dtype = at::kDouble, .device = world.device()});
      auto alone = build_model(spec, {.seed = 5, .dtype = at::kDouble});
      Engine engine = shard(world.mesh({.shard = world.size()}), *model, {.what = Sharded::parameters});
      Engine one = shard(World().mesh({}), *alone, {});
      Sgd optimizer(engine, {.lr = 0.1}), other(one, {.lr = 0.1});
      for (int step = 0; step < 3; ++step) {
        // Ranks may evaluate samples of their own.
        auto [input, target] = tiny_data(spec, step, world.rank(), 3);
        {
          const at::NoGradGuard no_grad;
          const double expected = alone->loss(input, target).item<double>();
          EXPECT_NEAR(model->loss(input.to(world.device()), target.to(world.device())).item<double>(), expected,
                      1e-12 * expected);
        }
        std::tie(input, target) = tiny_data(spec, step, 0, 4);
        engine.backward(model->loss(input.to(world.device()), target.to(world.device())));
        optimizer.step();
        one.backward(alone->loss(input, target));
        other.step();
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, GpuScopes, ::testing::Values(2, 4),
                         [](const auto& info) { return "ranks" + std::to_string(info.param); });

// What is kept between forward and backward is gathered among two of the four.
TEST(GpuReshard, AmongFewerRanksIsAsGood) {
  BONFIRE_SKIP_WITHOUT_GPU();
  make_deterministic();
  run_gpu_ranks(4, [](World& world) {
    for (const std::size_t model : {2u, 3u})
      for (const int to : {1, 2}) {
        const auto& spec = tiny_models()[model].spec;
        const auto alone = train_tiny(World(), {.spec = spec});
        const auto run = train_tiny(world, {.spec = spec,
                                            .accumulation = 3,
                                            .factor = 4,
                                            .options = {.what = Sharded::parameters, .reshard_after_forward = to}});
        SCOPED_TRACE(fmt::format("{}, to {}", tiny_models()[model].name, to));
        for (std::size_t step = 0; step < alone.losses.size(); ++step)
          EXPECT_NEAR(run.losses[step], alone.losses[step], 1e-12 * alone.losses[step]);
        EXPECT_LT(relative_distance(run.weights, alone.weights), 1e-12);
      }
  });
}

// Collective: four steps of a chain of `length` Units in the given order of each step and rank, against plain torch.
template <class OrderOf>
void train_in_orders(World& world, std::size_t length, const OrderOf& order_of) {
  alarm(240);  // a rank that waits for ever fails by this signal
  for (const Sharding& sharding : {Sharding{2, Sharded::parameters, true, 0}, Sharding{2, Sharded::parameters, true, 2},
                                   Sharding{2, Sharded::parameters, false, 1}}) {
    testing::Twins<Chain> twins(world, sharding,
                                [&] {
                                  Chain net(length);
                                  net->to(world.device());
                                  return net;
                                },
                                {.log = Log::silent()});
    for (int step = 0; step < 4; ++step)
      twins.step([&](Chain& net, int rank) {
        return net->forward(testing::chain_input(rank, step).to(world.device()), order_of(step, rank)).pow(2).mean();
      });
    twins.expect_equal();
  }
  alarm(0);
}

Order forwards(std::size_t length) {
  Order order;
  for (std::size_t at = 0; at < length; ++at) order.push_back(at);
  return order;
}

TEST(GpuOrders, RanksMayDisagreeFromTheFirstStepOn) {
  BONFIRE_SKIP_WITHOUT_GPU();
  run_gpu_ranks(2, [](World& world) {
    train_in_orders(world, 6, [](int, int rank) {
      const auto order = forwards(6);
      return rank % 2 ? Order(order.rbegin(), order.rend()) : order;
    });
  });
}

TEST(GpuOrders, RanksMayLeaveOutUnitsOfTheirOwn) {
  BONFIRE_SKIP_WITHOUT_GPU();
  run_gpu_ranks(2, [](World& world) {
    train_in_orders(world, 6, [](int step, int rank) {
      auto order = forwards(6);
      if (step > 0) order.erase(order.begin() + (2 + 3 * rank + step) % 6);
      return order;
    });
  });
}

}  // namespace
}  // namespace bonfire::scopes_test
