// How much of the communication of sharded parameters does prefetching hide? Units that sleep instead of computing, on four
// ranks, over an emulated link on which every all-gather and every reduction queues.
//
//   bench_prefetch [--repeats 5]
//
// Ranks are threads. "Predicted" is plan's time of a step with one compute and one communication stream, from the measured
// forward and backward times of a Unit in the same run and the link's time for each collective.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include <ATen/Parallel.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "bonfire/base/clock.h"
#include "bonfire/comm/world.h"
#include "bonfire/nn/unit.h"
#include "bonfire/plan/step_time.h"
#include "bonfire/shard/engine.h"

namespace {

using namespace bonfire;

constexpr int ranks = 4, blocks = 8, warmup = 3;
constexpr double forward_seconds = 0.030, backward_seconds = 0.060;
constexpr std::int64_t elements = 16 * 1024;  // 64 KiB a Unit: real ranks move it in no time

// What sleeping really took, over all ranks and steps that count.
struct Slept {
  std::atomic<std::int64_t> nanoseconds{0}, times{0};

  void sleep(double seconds) {
    const auto start = now_ns();
    std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
    nanoseconds += now_ns() - start;
    ++times;
  }
  void forget() { nanoseconds = times = 0; }
  double mean() const { return 1e-9 * static_cast<double>(nanoseconds) / static_cast<double>(times); }
};

struct Costs {
  Slept forward, backward;
};

struct Sleep : torch::autograd::Function<Sleep> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, const at::Tensor& weight,
                            Costs* costs) {
    costs->forward.sleep(forward_seconds);
    context->save_for_backward({weight});
    context->saved_data["costs"] = reinterpret_cast<std::int64_t>(costs);
    return x + weight.sum();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    reinterpret_cast<Costs*>(context->saved_data["costs"].toInt())->backward.sleep(backward_seconds);
    return {gradients[0], at::ones_like(context->get_saved_variables()[0]), at::Tensor()};
  }
};

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(Costs& costs) : costs_(&costs), weight_(register_parameter("weight", at::zeros({elements}))) {}
  at::Tensor forward(at::Tensor x) { return Sleep::apply(x, weight_, costs_); }

 private:
  Costs* costs_;
  at::Tensor weight_;
};
BONFIRE_UNIT(Block);

struct ChainImpl : torch::nn::Module {
  explicit ChainImpl(Costs& costs) {
    for (int at = 0; at < blocks; ++at) blocks_.push_back(register_module(std::to_string(at), Block(costs)));
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& block : blocks_) x = block->forward(x);
    return x.sum();
  }

 private:
  std::vector<Block> blocks_;
};
BONFIRE_UNIT(Chain);

struct Setting {
  Link link{};
  int prefetch = 0;
  BackwardPrefetch when = BackwardPrefetch::before_reduction;
};

struct Timing {
  double median, least, most;  // seconds of a step, of the slowest rank
  plan::UnitCost unit;
};

Timing measure(const Setting& setting, int repeats) {
  auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<double> seconds(static_cast<std::size_t>(repeats));
  Costs costs;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank)
    threads.emplace_back([&, rank] {
      World world = World::from_store(store, rank, ranks);
      Mesh mesh = world.mesh({.shard = ranks});
      if (setting.link.latency_seconds > 0) mesh = mesh.over(Axis::shard, setting.link);
      Chain model(costs);
      Engine engine =
          shard(mesh, model, {.what = Sharded::parameters, .prefetch = setting.prefetch, .backward_prefetch = setting.when});
      for (int repeat = -warmup; repeat < repeats; ++repeat) {
        if (repeat == 0 && rank == 0) costs.forward.forget(), costs.backward.forget();
        world.group().barrier().wait();
        const auto start = now_ns();
        engine.backward(model->forward(at::zeros({1}).set_requires_grad(true)));
        engine.spend_gradients();
        const double slowest = world.group().max(seconds_since(start));
        if (repeat >= 0 && rank == 0) seconds[static_cast<std::size_t>(repeat)] = slowest;
      }
    });
  for (auto& thread : threads) thread.join();
  std::sort(seconds.begin(), seconds.end());
  return {seconds[seconds.size() / 2], seconds.front(), seconds.back(), {costs.forward.mean(), costs.backward.mean()}};
}

double predict(const Setting& setting, const plan::UnitCost& unit) {
  const auto over = [&](CollectiveKind kind) {
    return seconds_over(setting.link, {kind, Axis::shard, elements * 4}, ranks);
  };
  std::vector<plan::StepUnit> units;
  // Buffers are numbered as backward finishes them.
  for (std::size_t at = 0; at < blocks; ++at) units.push_back({.flat = blocks - 1 - at, .writes = {blocks - 1 - at}});
  const plan::DataParallel layout{.shard = ranks,
                                  .what = plan::Sharded::parameters,
                                  .prefetch = setting.prefetch,
                                  .backward_prefetch = setting.when == BackwardPrefetch::before_reduction
                                                           ? plan::BackwardPrefetch::before_reduction
                                                           : plan::BackwardPrefetch::after_reduction};
  plan::StepCosts costs{.units = std::vector<plan::UnitCost>(blocks, unit)};
  costs.flats.assign(blocks, {.gather = over(CollectiveKind::all_gather), .reduce = over(CollectiveKind::reduce_scatter)});
  return plan::time_of_step(units, layout, costs).seconds;
}

}  // namespace

int main(int argc, char** argv) {
  int repeats = 5;
  for (int at = 1; at + 1 < argc; ++at)
    if (std::strcmp(argv[at], "--repeats") == 0) repeats = std::max(1, std::atoi(argv[at + 1]));
  at::set_num_threads(1);

  const auto plain = measure({.prefetch = 2}, repeats);
  std::printf(
      "Parameters sharded over %d ranks and freed after forward; %d synthetic Units that sleep for %.0f ms in forward and "
      "%.0f ms in backward, with one all-gather in forward, one in backward (except for the last Unit) and one reduction "
      "each. Median of %d [minimum, maximum]. Without an emulated link a step takes %.1f ms, and a Unit %.2f and %.2f ms. "
      "The prediction uses the times of single Units from the same run and the link's time per collective, but no measured "
      "step. Exposed communication is the time by which a step exceeds the sum of its Units.\n\n",
      ranks, blocks, forward_seconds * 1e3, backward_seconds * 1e3, repeats, plain.median * 1e3, plain.unit.forward * 1e3,
      plain.unit.backward * 1e3);
  std::printf(
      "| time per collective | sum | prefetch | backward prefetch | step | exposed communication | predicted step | "
      "predicted exposed | difference |\n|---|---|---|---|---|---|---|---|---|\n");
  double worst = 0;
  for (const double delay : {0.015, 0.035, 0.050})
    for (const int prefetch : {0, 1, 2, 4})
      for (const auto when : {BackwardPrefetch::before_reduction, BackwardPrefetch::after_reduction}) {
        const Setting setting{{.latency_seconds = delay}, prefetch, when};
        const auto timing = measure(setting, repeats);
        const double predicted = predict(setting, timing.unit);
        const double compute = blocks * (timing.unit.forward + timing.unit.backward), off = timing.median / predicted - 1;
        worst = std::max(worst, std::abs(off));
        std::printf("| %.0f ms | %.0f ms | %d | %s | %.1f ms [%.1f, %.1f] | %.1f ms | %.1f ms | %.1f ms | %+.1f %% |\n",
                    delay * 1e3, delay * (3 * blocks - 1) * 1e3, prefetch,
                    when == BackwardPrefetch::before_reduction ? "before reduction" : "after reduction", timing.median * 1e3,
                    timing.least * 1e3, timing.most * 1e3, (timing.median - compute) * 1e3, predicted * 1e3,
                    (predicted - compute) * 1e3, off * 1e2);
        std::fflush(stdout);
      }
  std::printf("\nLargest difference from the prediction: %.1f %%.\n", worst * 1e2);
}
