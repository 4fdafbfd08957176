// The steps of bench/small_llama.toml as a program of the library: any sharding, any wrapping. Says what `bonfire bench
// step` does not: the memory of the process as the kernel sees it, which can be compared with other people's programs, and
// the processor time of a step, which a busy machine stretches less than the step itself.
//
//   bonfire launch -n 2 -- bench_sharded_step [--steps 10] [--shard 2] [--what parameters] [--prefetch 2] [--keep 0]
//                          [--model llama | vgg] [--wrap all | SIZE | types:NAME,... | predicate | one]
// prints one JSON object. `--wrap all` wraps every Unit, a number those with at least so many parameters, `predicate` every
// second block, `one` the whole model. `--model vgg` is VGG16 for small images, whose Units differ in size by a thousand.
#include <algorithm>
#include <cstdio>
#include <ctime>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include <ATen/Parallel.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>

#include "bench/cpu/process_memory.h"
#include "bench/cpu/small_llama.h"
#include "bonfire/base/clock.h"
#include "bonfire/bonfire.h"
#include "bonfire/train/memory.h"

namespace {

using namespace bonfire;
using bench::resident_bytes;

using Arguments = std::map<std::string, std::string>;

Wrapping wrapping_of(const std::string& name) {
  if (name == "all") return {};
  if (name == "one") return {.all_in_one = true};
  if (name == "predicate")
    return {.predicate = [](const std::string& path, torch::nn::Module&) {
      return !path.empty() && std::isdigit(path.back()) && (path.back() - '0') % 2 == 0;
    }};
  if (name.starts_with("types:")) {
    Wrapping wrapping;
    for (std::size_t from = 6; from < name.size();) {
      const auto to = std::min(name.find(',', from), name.size());
      wrapping.types.push_back(name.substr(from, to - from));
      from = to + 1;
    }
    return wrapping;
  }
  return {.min_parameters = std::stoll(name)};
}

double processor_seconds() {
  timespec time{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

void measure(World& world, const Arguments& given) {
  constexpr std::int64_t batch = 8, pixels = 32, classes = 10;
  const auto llama = bench::small_llama();
  const std::int64_t sequence = llama.positions, vocab = llama.vocab;
  const auto argument = [&](const char* name, const char* otherwise) {
    const auto found = given.find(name);
    return found == given.end() ? std::string(otherwise) : found->second;
  };
  const int steps = std::stoi(argument("steps", "10")), warmup = 3;
  const int shards = std::stoi(argument("shard", std::to_string(world.size()).c_str()));

  at::set_num_threads(std::max(1, static_cast<int>(std::thread::hardware_concurrency()) / world.local_size()));
  const MemoryMeter meter(world.device());
  const Mesh mesh = world.mesh({.replicate = world.size() / shards, .shard = shards});
  bench::forget_peak_resident();
  const auto before = resident_bytes("VmRSS");
  const bool images = argument("model", "llama") == "vgg";
  const plan::ModelSpec vgg{.type = plan::ModelType::vgg, .ffn = 1024, .classes = classes, .image = pixels, .pool = 1};
  auto model = build_model(images ? vgg : llama, {.seed = 1});
  ShardOptions options{.what = plan::sharded_of(argument("what", "parameters")),
                       .reshard_after_forward = argument("keep", "0") == "0",
                       .prefetch = std::stoi(argument("prefetch", "2")),
                       .wrapping = wrapping_of(argument("wrap", "all"))};
  const auto groups = groups_of(*model, options.wrapping).size();
  Engine engine = shard(mesh, model, std::move(options));
  AdamW optimizer(engine, {.lr = 3e-4, .beta1 = 0.9, .beta2 = 0.95, .weight_decay = 0.1});

  std::vector<double> seconds, processor;
  std::int64_t moved = 0, collectives = 0;
  for (int step = 0; step < warmup + steps; ++step) {
    const std::int64_t mine = batch / world.size();
    const auto tokens = at::randint(vocab, {mine, sequence + 1}, at::kLong);
    const auto input = images ? at::randn({mine, 3, pixels, pixels}) : tokens.narrow(1, 0, sequence).contiguous();
    const auto target = images ? at::randint(classes, {mine}, at::kLong) : tokens.narrow(1, 1, sequence).contiguous();
    if (step == 1) world.recorder().start();
    const auto start = now_ns();
    const double processor_start = processor_seconds();
    engine.backward(model->loss(input, target));
    optimizer.step({.clip = 1.0});
    if (step >= warmup) {
      seconds.push_back(seconds_since(start));
      processor.push_back(processor_seconds() - processor_start);
    }
    if (step == 1) {
      world.recorder().stop();
      for (const auto& what : world.recorder().collectives()) {
        ++collectives;
        moved += static_cast<std::int64_t>(bus_factor(what.kind, mesh.shape().along(what.axis)) *
                                           static_cast<double>(what.bytes));
      }
    }
  }
  const double process = world.group().max(static_cast<double>(resident_bytes("VmHWM") - before));
  const double counted = world.group().max(static_cast<double>(meter.peak()));
  const double step_seconds = median(seconds), processor_step = world.group().sum(median(processor));
  if (world.rank() != 0) return;
  std::printf(
      "{\"tokens_per_second\": %.1f, \"step_ms\": %.3f, \"processor_ms\": %.3f, \"process_memory_bytes\": %.0f, "
      "\"peak_memory_bytes\": %.0f, \"collectives\": %lld, \"moved_bytes\": %lld, \"groups\": %zu, "
      "\"pool_bytes\": %lld}\n",
      (images ? batch : batch * sequence) / step_seconds, step_seconds * 1e3, processor_step * 1e3, process, counted,
      static_cast<long long>(collectives), static_cast<long long>(moved), groups,
      static_cast<long long>(engine.pool_bytes()));
}

}  // namespace

int main(int argc, char** argv) {
  Arguments given;
  for (int at = 1; at + 1 < argc; at += 2) given[argv[at] + 2] = argv[at + 1];
  return bonfire::launch(argc, argv, [&](World& world) { measure(world, given); },
                         {.device = [](const Environment&) { return c10::Device(c10::kCPU); }});
}
