// Does communication overlap with backward, and is the speed-up with more ranks as predicted? Blocks that sleep instead of
// computing make both measurable on any machine, however few cores it has: sleeping ranks do not slow each other down.
//
//   bench_overlap [--repeats 5]
//
// Ranks are threads. The first table delays every reduction by an emulated link; the second divides one batch among 1 to 8
// ranks. "Predicted" is a timeline of one compute and one communication stream, from the costs alone.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <thread>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/module.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "bonfire/base/clock.h"
#include "bonfire/comm/world.h"
#include "bonfire/shard/engine.h"

namespace {

using namespace bonfire;

constexpr int blocks = 6;
constexpr double forward_seconds = 0.040, backward_seconds = 0.080;
constexpr std::int64_t elements = 16 * 1024;  // 64 KiB a block, a bucket of its own: real ranks move it in no time

void sleep_for(double seconds) { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); }

struct Sleep : torch::autograd::Function<Sleep> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, const at::Tensor& weight) {
    sleep_for(forward_seconds);
    context->save_for_backward({weight});
    return x + 1;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    sleep_for(backward_seconds);
    return {gradients[0], at::ones_like(context->get_saved_variables()[0])};
  }
};

struct Model : torch::nn::Module {
  Model() {
    for (int i = 0; i < blocks; ++i)
      weights.push_back(register_parameter("weight" + std::to_string(i), at::zeros({elements})));
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& weight : weights) x = Sleep::apply(x, weight);
    return x.sum();
  }
  std::vector<at::Tensor> weights;
};

struct Setting {
  int ranks;
  int microbatches;  // on each rank, in one step
  Link link;
};

// Median, least and most seconds of a step, of the slowest rank.
struct Timing {
  double median, least, most;
};

Timing measure(const Setting& setting, int repeats) {
  auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<double> seconds(static_cast<std::size_t>(repeats));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < setting.ranks; ++rank)
    threads.emplace_back([&, rank] {
      World world = World::from_store(store, rank, setting.ranks);
      Mesh mesh = world.mesh({.replicate = setting.ranks});
      if (setting.link.latency_seconds > 0 || setting.link.bytes_per_second > 0)
        mesh = mesh.over(Axis::replicate, setting.link);
      Model model;
      Engine engine = shard(mesh, model, {.buckets = {.bucket_bytes = 1, .first_bucket_bytes = 1}});
      for (int repeat = -1; repeat < repeats; ++repeat) {
        world.group().barrier().wait();
        const auto start = now_ns();
        for (int micro = 0; micro < setting.microbatches; ++micro) {
          const auto loss = model.forward(at::zeros({1}).set_requires_grad(true));
          micro + 1 < setting.microbatches ? engine.accumulate(loss) : engine.backward(loss);
        }
        engine.spend_gradients();
        const double slowest = world.group().max(seconds_since(start));
        if (repeat >= 0 && rank == 0) seconds[static_cast<std::size_t>(repeat)] = slowest;
      }
    });
  for (auto& thread : threads) thread.join();
  std::sort(seconds.begin(), seconds.end());
  return {seconds[seconds.size() / 2], seconds.front(), seconds.back()};
}

// The last backward's gradients become ready one block after the other and queue on the link.
double predict(const Setting& setting) {
  const double pass = blocks * (forward_seconds + backward_seconds);
  const double reduction =
      seconds_over(setting.link, {CollectiveKind::all_reduce, Axis::replicate, elements * 4}, setting.ranks);
  double compute = (setting.microbatches - 1) * pass + blocks * forward_seconds, link = 0;
  for (int block = 0; block < blocks; ++block) {
    compute += backward_seconds;
    link = std::max(link, compute) + reduction;
  }
  return setting.ranks == 1 ? compute : link;
}

}  // namespace

int main(int argc, char** argv) {
  int repeats = 5;
  for (int at = 1; at + 1 < argc; ++at)
    if (std::strcmp(argv[at], "--repeats") == 0) repeats = std::max(1, std::atoi(argv[at + 1]));
  at::set_num_threads(1);

  std::printf(
      "Overlap: 2 ranks; %d synthetic blocks that sleep for %.0f ms in forward and %.0f ms in backward, with one reduction "
      "each. Median of %d [minimum, maximum].\n\n",
      blocks, forward_seconds * 1e3, backward_seconds * 1e3, repeats);
  const double plain = measure({2, 1, {}}, repeats).median;
  std::printf(
      "| delay per reduction | sum of delays | step | increase | predicted step | exposed communication "
      "|\n|---|---|---|---|---|---|\n");
  for (const double delay : {0.0, 0.020, 0.040, 0.070, 0.120}) {
    const Setting setting{2, 1, {.latency_seconds = delay}};
    const auto timing = measure(setting, repeats);
    std::printf("| %.0f ms | %.0f ms | %.1f ms [%.1f, %.1f] | %.1f ms | %.1f ms | %.1f %% |\n", delay * 1e3,
                blocks * delay * 1e3, timing.median * 1e3, timing.least * 1e3, timing.most * 1e3,
                (timing.median - plain) * 1e3, predict(setting) * 1e3, 100 * (timing.median - plain) / timing.median);
  }

  std::printf(
      "\nSpeed-up: one batch of 8 microbatches divided among the ranks, over an emulated link of 1 ms and 100 MB/s.\n\n");
  std::printf("| ranks | step | speed-up | predicted | difference |\n|---|---|---|---|---|\n");
  double alone = 0, alone_predicted = 0;
  for (const int ranks : {1, 2, 4, 8}) {
    const Setting setting{ranks, 8 / ranks, {.latency_seconds = 1e-3, .bytes_per_second = 1e8}};
    const auto timing = measure(setting, repeats);
    const double predicted = predict(setting);
    if (ranks == 1) alone = timing.median, alone_predicted = predicted;
    const double speed_up = alone / timing.median, arithmetic = alone_predicted / predicted;
    std::printf("| %d | %.1f ms [%.1f, %.1f] | %.3f | %.3f | %+.1f %% |\n", ranks, timing.median * 1e3, timing.least * 1e3,
                timing.most * 1e3, speed_up, arithmetic, 100 * (speed_up / arithmetic - 1));
  }
}
