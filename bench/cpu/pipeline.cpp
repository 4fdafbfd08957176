// How long do schedules really take? Units that sleep instead of computing, on four pipeline ranks, compared with the
// simulation of the same table.
//
//   bench_pipeline [--repeats 5] [--seconds 0.02]
//
// Ranks are threads. The simulation uses the times of a forward and of the halves of a backward measured in the same run. A
// step lasts from the moment when the last rank is ready to the moment when the last rank has ended.
#include <algorithm>
#include <atomic>
#include <barrier>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include <ATen/Parallel.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/nn/module.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "bonfire/base/clock.h"
#include "bonfire/comm/world.h"
#include "bonfire/pipeline/pipeline.h"
#include "bonfire/schedule/generate.h"
#include "bonfire/schedule/timeline.h"

namespace {

using namespace bonfire;

constexpr int ranks = 4;
constexpr std::int64_t elements = 8 * 1024;  // 32 KiB a message

// What sleeping really took, over all ranks and steps that count.
struct Slept {
  std::atomic<std::int64_t> nanoseconds{0}, times{0};

  void sleep(double seconds) {
    const auto start = now_ns();
    std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
    nanoseconds += now_ns() - start;
    ++times;
  }
  double mean() const { return times ? 1e-9 * static_cast<double>(nanoseconds) / static_cast<double>(times) : 0; }
};

struct Sleeper {
  double seconds = 0.02;
  Slept forward, input, weight;
};

// One rank's step, from its first computation to its last.
struct Occupied {
  Nanoseconds first = 0, last = 0;

  void sleep(Slept& in, double seconds) {
    if (first == 0) first = now_ns();
    in.sleep(seconds);
    last = now_ns();
  }
};

// An operation with a parameter whose backward looks at what is asked of it, as those of layers do.
struct SleepNode : torch::autograd::Node {
  Sleeper* sleeper = nullptr;
  Occupied* occupied = nullptr;
  at::Tensor like;

  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    torch::autograd::variable_list out(2);
    if (task_should_compute_output(0)) occupied->sleep(sleeper->input, sleeper->seconds), out[0] = gradients[0];
    if (task_should_compute_output(1)) occupied->sleep(sleeper->weight, sleeper->seconds), out[1] = at::ones_like(like);
    return out;
  }
};

struct BlockImpl : torch::nn::Module {
  BlockImpl(Sleeper& of, Occupied& by)
      : sleeper(&of), occupied(&by), weight(register_parameter("weight", at::zeros({16}))) {}
  at::Tensor forward(const at::Tensor& x) {
    occupied->sleep(sleeper->forward, sleeper->seconds);
    // A first stage too has an input of its own, so that all of them cost the same.
    const auto input = x.requires_grad() ? x : x.detach().set_requires_grad(true);
    std::shared_ptr<SleepNode> node(new SleepNode, torch::autograd::deleteNode);
    node->sleeper = sleeper;
    node->occupied = occupied;
    node->like = weight.detach();
    node->set_next_edges(torch::autograd::collect_next_edges(input, weight));
    auto out = x.detach().clone();
    torch::autograd::set_history(out, node);
    return out;
  }
  Sleeper* sleeper;
  Occupied* occupied;
  at::Tensor weight;
};

struct Result {
  double measured = 0, shortest = 0, longest = 0, predicted = 0, bubble = 0, floor = 0, of_rank = 0;
};

Result measure(const schedule::Schedule& table, int repeats, double seconds) {
  Sleeper sleeper{.seconds = seconds};
  std::vector<double> times, occupied_times;
  std::vector<Occupied> occupied(ranks);
  std::barrier meeting(ranks);
  Nanoseconds begun = 0;
  schedule::Schedule lowered;
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < ranks; ++rank)
    threads.emplace_back([&, rank] {
      const World world = World::from_store(store, rank, ranks);
      Chain chain;
      for (int unit = 0; unit < table.stages; ++unit) chain.units.push_back(fmt::format("sleep {}", unit));
      chain.build = [&](UnitRange units) {
        auto block = std::make_shared<BlockImpl>(sleeper, occupied[static_cast<std::size_t>(rank)]);
        const bool last = units.end == table.stages;
        return StageModule{block, [block, last](Tensors values, const Microbatch&) {
                             auto out = block->forward(values[0]);
                             return Tensors{last ? out.sum() : out};
                           }};
      };
      Pipeline pipeline(world.mesh({.pipeline = ranks}), chain, {.schedule = table, .schedule_name = "bench"});
      if (rank == 0) lowered = pipeline.table();
      const std::vector<Microbatch> batch(static_cast<std::size_t>(table.microbatches),
                                          {.input = {at::ones({1, elements})}});
      for (int step = -1; step < repeats; ++step) {
        meeting.arrive_and_wait();
        occupied[static_cast<std::size_t>(rank)] = {};
        if (rank == 0) begun = now_ns();
        meeting.arrive_and_wait();
        pipeline.step(batch);
        meeting.arrive_and_wait();
        if (rank == 0 && step >= 0) {
          times.push_back(seconds_since(begun));
          Nanoseconds longest = 0;
          for (const auto& one : occupied) longest = std::max(longest, one.last - one.first);
          occupied_times.push_back(1e-9 * static_cast<double>(longest));
        }
        for (const int stage : pipeline.local_stages()) pipeline.engine(stage).spend_gradients();
      }
    });
  threads.clear();
  std::sort(times.begin(), times.end());
  std::sort(occupied_times.begin(), occupied_times.end());
  const double forward = sleeper.forward.mean(), input = sleeper.input.mean(), weight = sleeper.weight.mean();
  const auto timeline = schedule::simulate(
      lowered, schedule::Costs(schedule::StageCosts{
                   .forward = forward, .backward = input + weight, .input_gradient = input, .weight_gradient = weight}));
  const double median = times[times.size() / 2];
  const double work = (forward + input + weight) * table.microbatches * (table.stages / ranks);
  return {median,
          times.front(),
          times.back(),
          timeline.makespan,
          1 - work / median,
          timeline.bubble,
          1 - work / occupied_times[times.size() / 2]};
}

}  // namespace

int main(int argc, char** argv) {
  int repeats = 5;
  double seconds = 0.02;
  for (int at = 1; at + 1 < argc; at += 2) {
    if (!std::strcmp(argv[at], "--repeats")) repeats = std::atoi(argv[at + 1]);
    if (!std::strcmp(argv[at], "--seconds")) seconds = std::atof(argv[at + 1]);
  }
  at::set_num_threads(1);
  std::printf(
      "%d ranks; synthetic Units that sleep for %.0f ms in the forward of a stage and in each half of its backward. m: "
      "microbatches. simulated, measured: milliseconds per step. spread: between the shortest and the longest of the "
      "repeats. bubble: idle part of all ranks' time, measured and simulated. busiest: bubble of the rank that is occupied "
      "longest, from its first computation to its last, as the zero-bubble paper counts it.\n\n```\n",
      ranks, 1e3 * seconds);
  std::printf("%-12s %4s %10s %10s %8s %9s %9s %9s %9s\n", "schedule", "m", "simulated", "measured", "ratio", "spread %",
              "bubble", "simulated", "busiest");
  const auto row = [&](const std::string& name, int microbatches) {
    const auto table =
        schedule::generate(name, {.ranks = ranks, .microbatches = microbatches, .chunks = schedule::natural_chunks(name)});
    const auto r = measure(table, repeats, seconds);
    std::printf("%-12s %4d %10.1f %10.1f %8.4f %9.2f %8.2f%% %8.2f%% %8.2f%%\n", name.c_str(), microbatches,
                1e3 * r.predicted, 1e3 * r.measured, r.measured / r.predicted, 100 * (r.longest - r.shortest) / r.measured,
                100 * r.bubble, 100 * r.floor, 100 * r.of_rank);
    std::fflush(stdout);
  };
  for (const auto& name : schedule::schedule_names())
    for (const int microbatches : {8, 16, 32}) row(name, microbatches);
  row("zb-h2", 24);
  std::printf("```\n");
}
