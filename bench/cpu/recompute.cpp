// Forward and backward of a Llama-shaped model whose blocks are recomputed not at all, in part, and in full: processor time
// and the peak of memory, in one process on one thread, interleaved. What runs again is timed by itself.
//
//   bench_recompute [repeats] [microbatch]
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <map>
#include <memory>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include "bonfire/kernels/fused_linear.h"
#include "bonfire/kernels/self_attention.h"
#include "bonfire/models/model.h"
#include "bonfire/nn/unit.h"
#include "bonfire/plan/activations.h"
#include "bonfire/train/memory.h"

using at::Tensor;
using bonfire::plan::Recompute;

namespace {

const bonfire::plan::ModelSpec kSpec{.dim = 256, .layers = 6, .heads = 8, .ffn = 1024, .vocab = 4096, .positions = 256};

// Processor time of this thread, which does all the work: what else runs on the machine does not count.
double milliseconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return 1e3 * static_cast<double>(now.tv_sec) + 1e-6 * static_cast<double>(now.tv_nsec);
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2), values.end());
  return values[values.size() / 2];
}

// The forwards of blocks.
class BlockTimer final : public bonfire::UnitHook {
 public:
  void before_forward(bonfire::UnitSeam&, std::vector<Tensor>&) override { start_ = milliseconds(); }
  void after_forward(bonfire::UnitSeam&, std::vector<Tensor>&) override { sum_ += milliseconds() - start_; }
  double take() { return std::exchange(sum_, 0); }

 private:
  double start_ = 0, sum_ = 0;
};

// The products that are made again in part, of one block, with what comes before and after them.
class Parts {
 public:
  explicit Parts(std::int64_t batch) : x_(at::randn({batch, kSpec.positions, kSpec.dim})) {
    const std::int64_t size = kSpec.dim / kSpec.heads;
    layout_ = {.heads = kSpec.heads,
               .kv_heads = kSpec.heads,
               .rotary = bonfire::rotary_table({.positions = kSpec.positions, .head_dim = size}, at::kFloat),
               .in_place = true};
    parts_ = {.norm = {.weight = at::ones({kSpec.dim})},
              .up = at::randn({2 * kSpec.ffn, kSpec.dim}),
              .down = at::randn({kSpec.dim, kSpec.ffn})};
  }
  double time() const {
    const at::NoGradGuard no_grad;
    const double start = milliseconds();
    bonfire::feed_forward_wide(x_, parts_);
    bonfire::attention_reads(bonfire::normed_linear(x_, parts_.norm, qkv_, {}).out, layout_, 3);
    return milliseconds() - start;
  }

 private:
  Tensor x_, qkv_ = at::randn({3 * kSpec.dim, kSpec.dim});
  bonfire::QkvLayout layout_;
  bonfire::FeedForwardParts parts_;
};

struct Mode {
  const char* name;
  Recompute what;
  std::shared_ptr<bonfire::Model> model{};
  std::vector<double> steps{};
  std::int64_t peak = 0;
};

double step(Mode& mode, const Tensor& tokens, const Tensor& target) {
  for (auto& parameter : mode.model->parameters()) parameter.mutable_grad() = Tensor();
  const bonfire::MemoryMeter meter(c10::kCPU);
  const double start = milliseconds();
  mode.model->loss(tokens, target).backward();
  const double spent = milliseconds() - start;
  mode.peak = meter.peak();
  return spent;
}

}  // namespace

int main(int argc, char** argv) {
  const int repeats = argc > 1 ? std::atoi(argv[1]) : 11;
  const std::int64_t microbatch = argc > 2 ? std::atoi(argv[2]) : 8;
  at::set_num_threads(1);
  std::vector<Mode> modes{{"none", Recompute::none}, {"selective", Recompute::selective}, {"full", Recompute::full}};
  BlockTimer timer;
  for (auto& mode : modes) {
    auto description = bonfire::plan::describe(kSpec);
    bonfire::plan::recompute(description, mode.what);
    mode.model = bonfire::build_model(std::move(description), {});
  }
  for (std::size_t at = 1; at < modes.front().model->layers().size(); ++at)
    bonfire::unit_of(*modes.front().model->layers()[at])->hooks().add(timer);
  const Parts parts(microbatch);
  const Tensor tokens = at::randint(kSpec.vocab, {microbatch, kSpec.positions}, at::kLong);
  const Tensor target = at::randint(kSpec.vocab, {microbatch, kSpec.positions}, at::kLong);
  std::vector<double> blocks, products;
  for (int repeat = 0; repeat < repeats + 2; ++repeat) {
    if (repeat == 2)
      for (auto& mode : modes) mode.steps.clear();
    for (auto& mode : modes) {
      timer.take();
      mode.steps.push_back(step(mode, tokens, target));
      if (mode.what == Recompute::none && repeat >= 2) blocks.push_back(timer.take());
    }
    if (repeat >= 2) products.push_back(static_cast<double>(kSpec.layers) * parts.time());
  }
  const double plain = median(modes.front().steps);
  std::printf(
      "| recompute | forward and backward | of none | runs again, by itself | 1 + its share | peak beside the model |\n");
  std::printf("|---|---|---|---|---|---|\n");
  for (const auto& mode : modes) {
    const double again = mode.what == Recompute::full        ? median(blocks)
                         : mode.what == Recompute::selective ? median(products)
                                                             : 0;
    std::printf("| %s | %.1f ms | %.3f | %.1f ms | %.3f | %.1f MiB |\n", mode.name, median(mode.steps),
                median(mode.steps) / plain, again, 1 + again / plain, static_cast<double>(mode.peak) / (1 << 20));
  }
}
