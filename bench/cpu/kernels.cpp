// Our CPU kernels one by one, at the sizes of the 8.4M model in bench/small_llama.toml with four samples at once.
//
//   bench_kernels [--benchmark_filter=REGEX] [--threads=N]
//
// FLOP/s and bytes/s are those that the operation needs, not those that the kernel happens to perform: fused kernels show as
// faster.
#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <benchmark/benchmark.h>

#include "bonfire/kernels/activation.h"
#include "bonfire/kernels/attention.h"
#include "bonfire/kernels/cross_entropy.h"
#include "bonfire/kernels/norm.h"
#include "bonfire/kernels/optimizer.h"
#include "bonfire/kernels/product.h"
#include "bonfire/kernels/sum_of_squares.h"

namespace {

using at::Tensor;
using benchmark::Counter;
using benchmark::State;

constexpr std::int64_t kBatch = 4, kSequence = 256, kRows = kBatch * kSequence;
constexpr std::int64_t kDim = 256, kHeads = 8, kFfn = 1024, kVocab = 4096, kParameters = 8'400'000;
constexpr double kFloat = sizeof(float);

// Whether backward runs as well.
enum Direction : std::int64_t { forward = 0, both = 1 };

struct Cost {
  double flops = 0, bytes = 0;  // of one iteration
};

void count(State& state, const Cost& cost) {
  if (cost.flops > 0) state.counters["FLOP/s"] = Counter(cost.flops, Counter::kIsIterationInvariantRate);
  if (cost.bytes > 0) state.counters["bytes/s"] = Counter(cost.bytes, Counter::kIsIterationInvariantRate, Counter::kIs1024);
}

Tensor leaf(at::IntArrayRef shape, Direction direction) { return at::randn(shape).set_requires_grad(direction == both); }

Direction direction_of(const State& state) { return static_cast<Direction>(state.range(0)); }

// Runs `operation` of the leaves over and over, with a backward from a gradient that lies ready where asked for.
template <class Operation>
void measure(State& state, const std::vector<Tensor>& leaves, const Operation& operation) {
  const Direction direction = direction_of(state);
  const Tensor gradient = direction == both ? at::ones(operation().sizes()) : Tensor();
  for (auto _ : state) {
    const Tensor result = operation();
    if (direction == both) {
      result.backward(gradient);
      // Otherwise the next one would be added to it.
      for (const Tensor& leaf : leaves) leaf.mutable_grad() = Tensor();
    }
    benchmark::DoNotOptimize(result.data_ptr());
  }
}

// Backward of a product is two of the same size.
double products(const State& state) { return direction_of(state) == both ? 3 : 1; }

void rms_norm(State& state) {
  const Direction direction = direction_of(state);
  const Tensor x = leaf({kRows, kDim}, direction), weight = leaf({kDim}, direction);
  measure(state, {x, weight}, [&] { return bonfire::rms_norm(x, weight, {}); });
  // Forward reads and writes a row once; backward reads it and its gradient, and writes another.
  count(state, {.bytes = kFloat * kRows * kDim * (direction == both ? 5 : 2)});
}

void swiglu(State& state) {
  const Direction direction = direction_of(state);
  const Tensor gate_up = leaf({kRows, 2 * kFfn}, direction);
  measure(state, {gate_up}, [&] { return bonfire::swiglu(gate_up); });
  count(state, {.bytes = kFloat * kRows * kFfn * (direction == both ? 8 : 3)});
}

void cross_entropy(State& state) {
  const Direction direction = direction_of(state);
  const Tensor logits = leaf({kRows, kVocab}, direction), target = at::randint(kVocab, {kRows}, at::kLong);
  measure(state, {logits}, [&] { return bonfire::cross_entropy(logits, target, {}); });
  count(state, {.bytes = kFloat * kRows * kVocab * (direction == both ? 3 : 1)});
}

void linear(State& state) {
  const Direction direction = direction_of(state);
  const std::int64_t in = state.range(1), out = state.range(2);
  const Tensor x = leaf({kRows, in}, direction), weight = leaf({out, in}, direction);
  measure(state, {x, weight}, [&] { return bonfire::linear(x, weight, {}); });
  count(state, {.flops = products(state) * 2.0 * kRows * static_cast<double>(in * out)});
}

void linear_cross_entropy(State& state) {
  const Direction direction = direction_of(state);
  const Tensor x = leaf({kRows, kDim}, direction), weight = leaf({kVocab, kDim}, direction);
  const Tensor target = at::randint(kVocab, {kRows}, at::kLong);
  measure(state, {x, weight}, [&] { return bonfire::linear_cross_entropy(x, weight, target, {}); });
  count(state, {.flops = products(state) * 2.0 * kRows * kDim * kVocab});
}

void attention(State& state) {
  const Direction direction = direction_of(state);
  const auto heads = [&] { return leaf({kBatch, kHeads, kSequence, kDim / kHeads}, direction); };
  const Tensor q = heads(), k = heads(), v = heads();
  measure(state, {q, k, v}, [&] { return bonfire::attention(q, k, v, {.causal = true}); });
  // Two products of which the mask leaves half; backward has four, without counting those that it repeats.
  count(state, {.flops = products(state) * 2.0 * kBatch * kSequence * (kSequence + 1) * kDim});
}

void adam(State& state) {
  const bonfire::AdamBuffers buffers{.parameters = at::randn({kParameters}),
                                     .gradients = at::randn({kParameters}),
                                     .exp_avg = at::zeros({kParameters}),
                                     .exp_avg_sq = at::zeros({kParameters})};
  bonfire::AdamStep step{.lr = 3e-4, .beta2 = 0.95, .weight_decay = 0.1, .step = 0};
  for (auto _ : state) {
    ++step.step;
    bonfire::adam_(buffers, step);
  }
  count(state, {.bytes = kFloat * kParameters * 7});  // four are read, three written
}

void sum_of_squares(State& state) {
  const Tensor gradients = at::randn({kParameters});
  for (auto _ : state) benchmark::DoNotOptimize(bonfire::sum_of_squares(gradients).data_ptr());
  count(state, {.bytes = kFloat * kParameters});
}

BENCHMARK(rms_norm)->ArgName("backward")->Arg(forward)->Arg(both)->Unit(benchmark::kMicrosecond);
BENCHMARK(swiglu)->ArgName("backward")->Arg(forward)->Arg(both)->Unit(benchmark::kMicrosecond);
BENCHMARK(cross_entropy)->ArgName("backward")->Arg(forward)->Arg(both)->Unit(benchmark::kMicrosecond);
BENCHMARK(linear)
    ->ArgNames({"backward", "in", "out"})
    ->ArgsProduct({{forward, both}, {kDim}, {kDim, 3 * kDim, 2 * kFfn, kVocab}})
    ->Args({forward, kFfn, kDim})
    ->Args({both, kFfn, kDim})
    ->Unit(benchmark::kMicrosecond);
BENCHMARK(linear_cross_entropy)->ArgName("backward")->Arg(forward)->Arg(both)->Unit(benchmark::kMicrosecond);
BENCHMARK(attention)->ArgName("backward")->Arg(forward)->Arg(both)->Unit(benchmark::kMicrosecond);
BENCHMARK(adam)->Unit(benchmark::kMicrosecond);
BENCHMARK(sum_of_squares)->Unit(benchmark::kMicrosecond);

}  // namespace

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  int threads = 1;
  const std::string option = "--threads=";
  if (argc == 2 && std::string(argv[1]).starts_with(option)) {
    threads = std::atoi(argv[1] + option.size());
    argc = 1;
  }
  if (threads < 1 || benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  at::set_num_threads(threads);
  benchmark::AddCustomContext("threads", std::to_string(threads));
  benchmark::RunSpecifiedBenchmarks();
}
