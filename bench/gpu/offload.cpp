// What it costs to keep optimizer state and masters on the host, and how much of the copying hides behind the work.
//
//   bench_offload [--layers 24] [--width 4096] [--steps 5]
//
// A stack of square layers in bf16 with fp32 masters, AdamW, one rank on GPU 0. "Update" is the optimizer's step alone, from
// finished gradients to values that forward can read; medians. "Copies" are the same bytes, gradients down and then values
// up, with nothing beside them, "work" is AdamW over host memory of the same size, with nothing beside it. What both would
// take one after the other, less what the update took, was hidden.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/nn/modules/linear.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "bonfire/base/clock.h"
#include "bonfire/comm/device.h"
#include "bonfire/comm/world.h"
#include "bonfire/kernels/optimizer.h"
#include "bonfire/nn/sequential.h"
#include "bonfire/optim/optimizer.h"
#include "bonfire/shard/engine.h"

namespace {

using namespace bonfire;

struct Arguments {
  std::int64_t layers = 24, width = 4096;
  int steps = 5;
};

const c10::Device gpu(c10::kCUDA, 0);

double median_ms(int repeats, const std::function<void()>& prepare, const std::function<void()>& timed) {
  std::vector<double> seconds;
  for (int repeat = 0; repeat <= repeats; ++repeat) {
    prepare();
    synchronize(gpu);
    const auto start = now_ns();
    timed();
    synchronize(gpu);
    if (repeat > 0) seconds.push_back(seconds_since(start));  // the first one allocates
  }
  std::sort(seconds.begin(), seconds.end());
  return seconds[seconds.size() / 2] * 1e3;
}

struct Measured {
  double update_ms = 0, step_ms = 0;
};

Measured train(const Arguments& arguments, const World& world, Offload offload) {
  UnitSequential model;
  for (std::int64_t layer = 0; layer < arguments.layers; ++layer)
    model->push_back(torch::nn::Linear(torch::nn::LinearOptions(arguments.width, arguments.width).bias(false)));
  wrap_children(*model);
  model->to(gpu);
  Engine engine = shard(world.mesh({}), model, {.precision = {.parameters = at::kBFloat16}, .offload = offload});
  AdamW optimizer(engine, {.lr = 1e-4, .weight_decay = 0.1});
  const auto x = at::randn({4096, arguments.width}, at::TensorOptions(gpu).dtype(at::kBFloat16));
  const auto backward = [&] { engine.backward(model->forward(x).pow(2).mean()); };
  const auto update = [&] { optimizer.step(); };
  Measured measured;
  measured.step_ms = median_ms(
      arguments.steps, [] {},
      [&] {
        backward();
        update();
      });
  measured.update_ms = median_ms(arguments.steps, backward, update);
  return measured;
}

double copies_ms(std::int64_t elements, int repeats) {
  const auto gradients = at::zeros({elements}, at::TensorOptions(gpu).dtype(at::kFloat));
  const auto values = at::zeros({elements}, at::TensorOptions(gpu).dtype(at::kBFloat16));
  auto down = at::empty({elements}, at::TensorOptions(at::kFloat).pinned_memory(true));
  auto up = at::zeros({elements}, at::TensorOptions(at::kBFloat16).pinned_memory(true));
  return median_ms(
      repeats, [] {},
      [&] {
        down.copy_(gradients, /*non_blocking=*/true);
        values.copy_(up, /*non_blocking=*/true);
      });
}

double work_ms(std::int64_t elements, int repeats) {
  const AdamBuffers buffers{.parameters = at::zeros({elements}),
                            .gradients = at::ones({elements}),
                            .exp_avg = at::zeros({elements}),
                            .exp_avg_sq = at::zeros({elements}),
                            .low_precision = at::zeros({elements}, at::kBFloat16)};
  int step = 0;
  return median_ms(
      repeats, [] {}, [&] { adam_(buffers, {.lr = 1e-4, .weight_decay = 0.1, .step = ++step}); });
}

}  // namespace

int main(int argc, char** argv) {
  Arguments arguments;
  for (int at = 1; at + 1 < argc; ++at) {
    const auto is = [&](const char* name) { return std::strcmp(argv[at], name) == 0; };
    if (is("--layers")) arguments.layers = std::max(1, std::atoi(argv[at + 1]));
    if (is("--width")) arguments.width = std::max(1, std::atoi(argv[at + 1]));
    if (is("--steps")) arguments.steps = std::max(1, std::atoi(argv[at + 1]));
  }
  if (!gpu_available()) {
    std::fprintf(stderr, "%s\n", gpu_unavailable_reason().c_str());
    return 2;
  }
  set_current(gpu);
  const World world = World::from_store(c10::make_intrusive<c10d::HashStore>(), 0, 1, {.device = gpu});
  const std::int64_t elements = arguments.layers * arguments.width * arguments.width;
  std::printf("%.0fM parameters, %d threads on the host\n", static_cast<double>(elements) * 1e-6, at::get_num_threads());
  const double copies = copies_ms(elements, arguments.steps), work = work_ms(elements, arguments.steps);
  std::printf("copies alone %.1f ms, work alone %.1f ms (%.1f GB/s)\n\n", copies, work,
              static_cast<double>(elements) * 30 / work * 1e-6);
  std::printf("%-12s %12s %12s %16s\n", "offload", "step ms", "update ms", "copies hidden");
  const auto row = [&](const char* name, Offload offload) {
    const auto [update, step] = train(arguments, world, offload);
    std::printf("%-12s %12.1f %12.1f", name, step, update);
    if (offload == Offload::optimizer)
      std::printf(" %15.0f%%\n", 100 * std::clamp((copies + work - update) / copies, 0.0, 1.0));
    else
      std::printf(" %16s\n", "");
  };
  row("none", Offload::none);
  row("optimizer", Offload::optimizer);
  row("parameters", Offload::parameters);
}
