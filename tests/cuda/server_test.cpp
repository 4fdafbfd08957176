// A parameter server beside a worker whose model is on a GPU: weights and optimizer are in host memory.
#include <gtest/gtest.h>

#include <memory>

#include <ATen/ATen.h>

#include "bonfire/comm/device.h"
#include "bonfire/optim/optimizer.h"
#include "bonfire/server/server.h"
#include "bonfire/server/worker.h"
#include "bonfire/shard/engine.h"
#include "bonfire/train/memory.h"
#include "tests/support/gpu_ranks.h"
#include "tests/support/small_net.h"

namespace bonfire::server_test {
namespace {

using testing::run_gpu_ranks;
using testing::small_loss;
using testing::SmallNet;

constexpr int steps = 5;
const AdamOptions how{.lr = 0.05, .weight_decay = 0.1};

TEST(GpuServer, TrainsAModelOnAGpuFromTheHost) {
  BONFIRE_SKIP_WITHOUT_GPU();
  run_gpu_ranks(2, [](World& world) {
    const c10::Device gpu(c10::kCUDA, 0);
    const ServerOptions options{};
    if (is_server(world, options)) {
      const MemoryMeter memory(gpu);
      Server server(world, options, [](Shares& shares) { return std::make_unique<AdamW>(shares, how); });
      const auto report = server.serve();
      EXPECT_EQ(report.updates, steps);
      EXPECT_EQ(memory.peak(), 0) << "bytes on the GPU";
      return;
    }
    SmallNet here, there;
    auto engine = shard(World().mesh({}), here);
    AdamW optimizer(engine, how);
    there->to(gpu);
    Worker worker(world, there, options);
    for (int step = 0; step < steps; ++step) {
      engine.backward(small_loss(here, step));
      optimizer.step();
      worker.backward(small_loss(there, step));
      worker.step();
    }
    worker.await();
    for (const auto& parameter : there->named_parameters()) {
      EXPECT_TRUE(parameter.value().is_cuda()) << parameter.key();
      const auto expected = here->named_parameters()[parameter.key()];
      EXPECT_LE((parameter.value().cpu() - expected).abs().max().item<double>(), 1e-12) << parameter.key();
    }
    worker.finish();
  });
}

}  // namespace
}  // namespace bonfire::server_test
