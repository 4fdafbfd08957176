// How fast is PipeDream? Stages that sleep instead of computing, a process each, compared with the slowest stage, with the
// simulation of the same table, and with the same stages under another schedule.
//
//   bench_pipedream --ranks 8 --replicas 7,1 [--mode pipedream] [--minibatches 56] [--microbatches 1] [--seconds 0.02]
//                   [--against pipedream-flush] [--costs PARTITION.json]
//
// A stage with r replicas takes r times as long, so that all stages are as fast: --seconds for the forward of a microbatch
// and twice that for the backward of a stage without replicas. With --costs, replicas and the proportions of the stages are
// those of a partition (bonfire partition --json); the shortest forward takes --seconds then. Prints one JSON object: a
// minibatch in the full pipeline, the slowest stage, and the whole run, from an empty pipeline to an empty one, measured and
// simulated; with --against, the same of the other schedule, and how many times longer that takes, measured and simulated.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include <ATen/Parallel.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/nn/module.h>
#include <nlohmann/json.hpp>

#include "bonfire/base/clock.h"
#include "bonfire/base/error.h"
#include "bonfire/comm/launch.h"
#include "bonfire/optim/optimizer.h"
#include "bonfire/pipeline/pipedream.h"
#include "bonfire/schedule/lowering.h"
#include "bonfire/schedule/timeline.h"

namespace {

using namespace bonfire;

constexpr std::int64_t elements = 8 * 1024;  // 32 KiB a message

struct Asked {
  std::vector<int> replicas{1, 1, 1, 1};
  std::string mode = "pipedream";
  std::string against;                    // empty: nothing
  int minibatches = 0, microbatches = 1;  // 0: some
  double seconds = 0.02;
  std::vector<double> forwards;  // of a microbatch, by stage; a backward takes twice as long
};

// What sleeping has really taken.
struct Slept {
  double seconds = 0, total = 0;
  std::int64_t times = 0;

  void sleep() {
    const auto start = now_ns();
    std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
    total += seconds_since(start);
    ++times;
  }
};

struct SleepNode : torch::autograd::Node {
  Slept* slept = nullptr;
  at::Tensor like;

  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    slept->sleep();
    return {gradients[0], at::ones_like(like)};
  }
};

struct BlockImpl : torch::nn::Module {
  BlockImpl(Slept& forward, Slept& backward)
      : slept(&forward), later(&backward), weight(register_parameter("weight", at::zeros({16}))) {}
  at::Tensor forward(const at::Tensor& x) {
    slept->sleep();
    const auto input = x.requires_grad() ? x : x.detach().set_requires_grad(true);
    std::shared_ptr<SleepNode> node(new SleepNode, torch::autograd::deleteNode);
    node->slept = later;
    node->like = weight.detach();
    node->set_next_edges(torch::autograd::collect_next_edges(input, weight));
    auto out = x.detach().clone();
    torch::autograd::set_history(out, node);
    return out;
  }
  Slept *slept, *later;
  at::Tensor weight;
};

// In seconds.
struct Measured {
  int minibatches = 0;
  double minibatch = 0, slowest = 0, whole = 0, simulated = 0;
};

schedule::WeightMode mode_of(const std::string& name) {
  const auto mode = schedule::weight_mode(name);
  if (!mode) fail_config("schedule '{}'; allowed: {}", name, fmt::join(schedule::pipedream_names(), ", "));
  return *mode;
}

// Collective. Measured on the first rank.
Measured measure(const World& world, const Asked& asked, const std::string& mode) {
  schedule::RoundRobin robin{.replicas = asked.replicas, .mode = mode_of(mode), .microbatches = asked.microbatches};
  const int stages = static_cast<int>(robin.replicas.size());
  const int full = schedule::endless_shape(robin).minibatches;
  Slept forward, backward;
  Chain chain;
  for (int unit = 0; unit < stages; ++unit) chain.units.push_back(fmt::format("sleep {}", unit));
  chain.build = [&](UnitRange units) {
    forward.seconds = asked.forwards[static_cast<std::size_t>(units.begin)];
    backward.seconds = 2 * forward.seconds;
    auto block = std::make_shared<BlockImpl>(forward, backward);
    return StageModule{block, [block, last = units.end == stages](Tensors values, const Microbatch&) {
                         auto out = block->forward(values[0]);
                         return Tensors{last ? out.sum() : out};
                       }};
  };
  PipeDream pipeline(world.mesh({.pipeline = world.size()}), chain,
                     {.robin = robin, .example = {.input = {at::ones({1, elements})}}});
  Sgd optimizer(pipeline, {.lr = 0.1});
  std::vector<Nanoseconds> updates;
  pipeline.on_update([&](const StageUpdate&) {
    optimizer.step();
    updates.push_back(now_ns());
  });
  const std::vector<Microbatch> minibatch(static_cast<std::size_t>(robin.microbatches),
                                          {.input = {at::ones({1, elements})}});
  const auto go = [&] {
    world.group().barrier().wait();
    updates.clear();
    const auto begin = now_ns();
    for (int at = 0; at < robin.minibatches; ++at) pipeline.admit(minibatch);
    pipeline.drain();
    world.group().barrier().wait();
    return seconds_since(begin);
  };
  // Connections are made in the first run.
  robin.minibatches = robin.round();
  go();
  robin.minibatches = asked.minibatches;
  forward = {.seconds = forward.seconds};
  backward = {.seconds = backward.seconds};
  Measured measured{.minibatches = robin.minibatches, .whole = go()};

  // Of the last stage's first replica: updates of a full pipeline.
  const int skip = std::min<int>(full, static_cast<int>(updates.size()) / 4);
  const auto first = static_cast<std::size_t>(skip), last = updates.size() - 1 - static_cast<std::size_t>(skip);
  const int round = robin.round() == 1 ? 1 : robin.replicas.back();
  const double steady =
      1e-9 * static_cast<double>(updates[last] - updates[first]) / static_cast<double>(last - first) / round;
  auto mine = at::zeros({3}, at::kDouble);
  mine[0] = forward.total / static_cast<double>(forward.times);
  mine[1] = backward.total / static_cast<double>(backward.times);
  mine[2] = steady;
  auto all = at::zeros({3 * world.size()}, at::kDouble);
  world.group().all_gather(all, mine).wait();
  const auto of = [&](int rank, int what) { return all[3 * rank + what].item<double>(); };
  for (int stage = 0; stage < stages; ++stage)
    measured.slowest =
        std::max(measured.slowest, robin.microbatches * (of(robin.first_rank(stage), 0) + of(robin.first_rank(stage), 1)) /
                                       robin.replicas[static_cast<std::size_t>(stage)]);
  measured.minibatch = of(robin.first_rank(stages - 1), 2);
  // What sleeping has really taken is what the clock is given.
  schedule::Costs costs;
  costs.action = [&](const schedule::Action& action) {
    if (action.kind != schedule::Kind::forward && action.kind != schedule::Kind::backward) return 0.0;
    return of(robin.first_rank(action.stage), action.kind == schedule::Kind::forward ? 0 : 1);
  };
  measured.simulated = schedule::simulate(schedule::lower(schedule::pipedream(robin), {.reductions = true}), costs).makespan;
  return measured;
}

nlohmann::ordered_json to_json(const std::string& mode, const Asked& asked, const Measured& measured) {
  return {{"schedule", mode},
          {"replicas", asked.replicas},
          {"minibatches", measured.minibatches},
          {"microbatches", asked.microbatches},
          {"minibatch_ms", 1e3 * measured.minibatch},
          {"slowest_ms", 1e3 * measured.slowest},
          {"whole_ms", 1e3 * measured.whole},
          {"simulated_ms", 1e3 * measured.simulated}};
}

void run(const World& world, Asked asked) {
  at::set_num_threads(1);
  if (asked.forwards.size() != asked.replicas.size())
    fail_config("{} stages with times and {} with replicas", asked.forwards.size(), asked.replicas.size());
  const schedule::RoundRobin robin{
      .replicas = asked.replicas, .mode = mode_of(asked.mode), .microbatches = asked.microbatches};
  if (asked.minibatches == 0) asked.minibatches = 4 * schedule::endless_shape(robin).minibatches;
  const auto measured = measure(world, asked, asked.mode);
  auto answer = to_json(asked.mode, asked, measured);
  if (!asked.against.empty()) {
    const auto other = measure(world, asked, asked.against);
    answer["against"] = to_json(asked.against, asked, other);
    answer["gain"] = other.whole / measured.whole;
    answer["simulated_gain"] = other.simulated / measured.simulated;
  }
  if (world.rank() == 0) std::printf("%s\n", answer.dump().c_str());
}

// Replicas, and the times of stages in proportion.
void take_costs(Asked& asked, const std::string& file) {
  std::ifstream in(file);
  const auto partition = nlohmann::json::parse(in, nullptr, /*allow_exceptions=*/false);
  if (!partition.is_object() || !partition.contains("stages"))
    fail_config("--costs {}: is no partition as bonfire partition --json prints", file);
  asked.replicas.clear();
  for (const auto& stage : partition.at("stages")) {
    asked.replicas.push_back(stage.at("replicas").get<int>());
    asked.forwards.push_back(stage.at("compute_ms").get<double>());
  }
  const double least = *std::min_element(asked.forwards.begin(), asked.forwards.end());
  for (auto& seconds : asked.forwards) seconds *= asked.seconds / least;
}

}  // namespace

int main(int argc, char** argv) {
  Asked asked;
  std::string costs;
  for (int at = 1; at + 1 < argc; ++at) {
    const std::string option = argv[at], value = argv[at + 1];
    if (option == "--mode") asked.mode = value;
    if (option == "--against") asked.against = value;
    if (option == "--costs") costs = value;
    if (option == "--minibatches") asked.minibatches = std::stoi(value);
    if (option == "--microbatches") asked.microbatches = std::stoi(value);
    if (option == "--seconds") asked.seconds = std::stod(value);
    if (option != "--replicas") continue;
    asked.replicas.clear();
    std::istringstream words(value);
    for (std::string word; std::getline(words, word, ',');) asked.replicas.push_back(std::stoi(word));
  }
  return bonfire::launch(argc, argv, [&](bonfire::World& world) {
    if (costs.empty())
      for (const int replicas : asked.replicas) asked.forwards.push_back(replicas * asked.seconds);
    else
      take_costs(asked, costs);
    run(world, asked);
  });
}
