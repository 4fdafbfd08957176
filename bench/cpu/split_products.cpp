// Do products of split layers overlap with what ranks exchange beside them, and by as much as predicted? Feed-forward layers
// with real products on two ranks, a core each, over an emulated link; forward and backward, in one piece and in chunks.
//
//   bench_split_products [--repeats 5]
//
// Ranks are threads. "Predicted" is a clock of one stream of computation and one of communication; it is told what each
// product takes on this machine without a link, and what the link takes.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "bonfire/base/clock.h"
#include "bonfire/comm/world.h"
#include "bonfire/kernels/activation.h"
#include "bonfire/nn/split_products.h"
#include "bonfire/schedule/clock.h"

namespace {

using namespace bonfire;
using at::Tensor;
using schedule::Clock;
using schedule::Task;

constexpr int ranks = 2, layers = 4;
constexpr std::int64_t samples = 8, sequence = 128, width = 512, own_wide = 1024;
constexpr std::int64_t rows = samples * sequence;

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// Each rank calls it; seconds of the slowest.
double seconds_of(World& world, int repeats, const std::function<void()>& body) {
  std::vector<double> all;
  for (int repeat = -1; repeat < repeats; ++repeat) {
    world.group().barrier().wait();
    const auto start = now_ns();
    body();
    const double slowest = world.group().max(seconds_since(start));
    if (repeat >= 0) all.push_back(slowest);
  }
  return median(std::move(all));
}

struct Costs {
  std::map<int, double> up, down, down_input;  // by chunks: seconds of all rows
  double activation = 0, activation_backward = 0, up_input = 0, up_weight = 0, down_weight = 0;
};

Costs measure_costs(World& world, const std::vector<int>& chunks, int repeats) {
  const Tensor x = at::randn({rows, width}), wide = at::randn({rows, own_wide}), up = at::randn({own_wide, width}),
               down = at::randn({width, own_wide});
  Costs costs;
  for (const int count : chunks) {
    const std::int64_t some = rows / count;
    const auto in_chunks = [&](const Tensor& a, const Tensor& b) {
      return seconds_of(world, repeats, [&] {
        const Tensor out = at::empty({rows, b.size(1)});
        for (int chunk = 0; chunk < count; ++chunk)
          product_into(out.narrow(0, chunk * some, some), a.narrow(0, chunk * some, some), b, Writing::overwrite);
      });
    };
    costs.up[count] = in_chunks(x, up.t());
    costs.down[count] = in_chunks(wide, down.t());
    costs.down_input[count] = in_chunks(x, down);
  }
  const auto once = [&](const std::function<void()>& body) { return seconds_of(world, repeats, body); };
  costs.activation = once([&] { activate(Activation::gelu, wide); });
  costs.activation_backward = once([&] { activate_backward(Activation::gelu, wide, wide); });
  costs.up_input = once([&] { product(wide, up); });
  costs.up_weight = once([&] { product(wide.t(), x); });
  costs.down_weight = once([&] { product(x.t(), wide); });
  return costs;
}

// One layer after the other, forward and then backward, as bonfire/nn/split_products.cpp does it.
double predict(const Costs& costs, const Link& link, int chunks) {
  Clock clock;
  const auto compute = clock.resource("compute"), wire = clock.resource("wire");
  const auto exchange = [&](CollectiveKind kind, int parts) {
    return seconds_over(link, {kind, Axis::tensor, rows * width * 4 / parts}, ranks);
  };
  const double gather = exchange(CollectiveKind::all_gather, chunks),
               reduce = exchange(CollectiveKind::reduce_scatter, chunks);
  Task last = clock.task(compute, 0);
  const auto gathered_product = [&](double seconds) {
    std::vector<Task> coming;
    for (int chunk = 0; chunk < chunks; ++chunk) coming.push_back(clock.task(wire, gather, {last}));
    for (const Task& part : coming) last = clock.task(compute, seconds / chunks, {part});
  };
  for (int layer = 0; layer < layers; ++layer) {
    gathered_product(costs.up.at(chunks));
    last = clock.task(compute, costs.activation);
    Task sum = last;
    for (int chunk = 0; chunk < chunks; ++chunk) {
      last = clock.task(compute, costs.down.at(chunks) / chunks);
      sum = clock.task(wire, reduce, {last});
    }
    last = clock.task(compute, 0, {sum});
  }
  for (int layer = 0; layer < layers; ++layer) {
    gathered_product(costs.down_input.at(chunks));
    last = clock.task(compute, costs.activation_backward + costs.down_weight);
    const Task read = clock.task(wire, exchange(CollectiveKind::all_gather, 1), {last});
    last = clock.task(compute, costs.up_input);
    const Task sum = clock.task(wire, exchange(CollectiveKind::reduce_scatter, 1), {last});
    last = clock.task(compute, costs.up_weight, {read});
    last = clock.task(compute, 0, {sum});
  }
  clock.run();
  return clock.makespan();
}

}  // namespace

int main(int argc, char** argv) {
  int repeats = 5;
  for (int at = 1; at + 1 < argc; ++at)
    if (std::strcmp(argv[at], "--repeats") == 0) repeats = std::max(1, std::atoi(argv[at + 1]));
  at::set_num_threads(1);
  const std::vector<int> all_chunks{1, 2, 4, 8};
  const std::vector<double> speeds{0, 400e6, 200e6, 100e6};

  auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank)
    threads.emplace_back([&, rank] {
      World world = World::from_store(store, rank, ranks);
      const Mesh mesh = world.mesh({.tensor = ranks});
      const Costs costs = measure_costs(world, all_chunks, repeats);
      std::vector<Tensor> weights;
      for (int layer = 0; layer < layers; ++layer) {
        weights.push_back(at::randn({own_wide, width}).mul_(0.02).requires_grad_());
        weights.push_back(at::randn({width, own_wide}).mul_(0.02).requires_grad_());
      }
      const Tensor input = at::randn({samples, sequence / ranks, width}).requires_grad_();
      const auto step = [&](const TensorRanks& how) {
        Tensor x = input;
        for (int layer = 0; layer < layers; ++layer) {
          const auto at = static_cast<std::size_t>(2 * layer);
          const auto [wide, stream] = rows_linear(x, {}, weights[at], {}, how);
          x = columns_linear(wide, weights[at + 1], {.activation = Activation::gelu, .linear = {.residual = stream}}, how);
        }
        x.backward(at::ones_like(x));
      };
      if (rank == 0)
        std::printf(
            "%d feed-forward layers, %ld tokens of width %ld, %ld of the inner width on each of %d ranks with a core each; "
            "forward and backward. Median of %d.\n\n| link | chunks | step | predicted | difference | time that only the "
            "link "
            "activations |\n|---|---|---|---|---|---|\n",
            layers, static_cast<long>(rows), static_cast<long>(width), static_cast<long>(own_wide), ranks, repeats);
      for (const double speed : speeds) {
        const Link link{.latency_seconds = 0, .bytes_per_second = speed};
        const Group group = speed > 0 ? mesh.over(Axis::tensor, link).group(Axis::tensor) : mesh.group(Axis::tensor);
        for (const int chunks : all_chunks) {
          const double measured =
              seconds_of(world, repeats, [&] { step({.group = group, .sequence = true, .chunks = chunks}); });
          const double predicted = predict(costs, link, chunks), computing = predict(costs, {}, chunks);
          if (rank != 0) continue;
          if (speed > 0)
            std::printf("| %.0f MB/s ", speed / 1e6);
          else
            std::printf("| none ");
          std::printf("| %d | %.1f ms | %.1f ms | %+.1f %% | %.0f %% |\n", chunks, measured * 1e3, predicted * 1e3,
                      100 * (measured / predicted - 1), 100 * std::max(0.0, 1 - computing / measured));
          std::fflush(stdout);
        }
      }
    });
  for (auto& thread : threads) thread.join();
}
