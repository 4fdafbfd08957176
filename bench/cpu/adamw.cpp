// How near AdamW on the CPU comes to what the memory allows: that decides the step time where optimizer state lies on the
// host.
//
//   bench_adamw [--elements 33554432] [--repeats 7]
//
// "Limit" is a loop over buffers of the same sizes that reads and writes as many bytes and only adds. Best of all repeats,
// which take turns.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>

#include "bonfire/base/clock.h"
#include "bonfire/kernels/optimizer.h"
#include "bonfire/kernels/vectorize.h"

namespace {

using namespace bonfire;

struct Case {
  const char* name;
  at::ScalarType gradient;
  bool low_precision;

  double bytes() const { return 24 + static_cast<double>(c10::elementSize(gradient)) + (low_precision ? 2 : 0); }
};

template <class G>
BONFIRE_INLINE void touch_loop(std::uint32_t* __restrict p, const G* __restrict g, std::uint32_t* __restrict m,
                               std::uint32_t* __restrict v, std::int64_t n) {
#pragma omp simd
  for (std::int64_t i = 0; i < n; ++i) {
    const std::uint32_t x = g[i];
    p[i] += x;
    m[i] += x;
    v[i] += x;
  }
}

BONFIRE_CLONES void touch_rows(std::uint32_t* p, const std::uint32_t* g, std::uint32_t* m, std::uint32_t* v,
                               std::int64_t n) {
  touch_loop(p, g, m, v, n);
}
BONFIRE_CLONES void touch_rows(std::uint32_t* p, const std::uint16_t* g, std::uint32_t* m, std::uint32_t* v,
                               std::int64_t n) {
  touch_loop(p, g, m, v, n);
}
BONFIRE_CLONES void copy_rows(std::uint16_t* __restrict out, const std::uint32_t* __restrict in, std::int64_t n) {
#pragma omp simd
  for (std::int64_t i = 0; i < n; ++i) out[i] = static_cast<std::uint16_t>(in[i]);
}

// The traffic of a step without its arithmetic: adds the buffers' bits as integers.
void touch(const AdamBuffers& b) {
  const auto bits = [](const at::Tensor& tensor) { return static_cast<std::uint32_t*>(tensor.data_ptr()); };
  std::uint32_t *p = bits(b.parameters), *m = bits(b.exp_avg), *v = bits(b.exp_avg_sq);
  const std::uint32_t* wide = b.gradients.scalar_type() == at::kFloat ? bits(b.gradients) : nullptr;
  const auto* narrow = static_cast<const std::uint16_t*>(b.gradients.const_data_ptr());
  auto* low = b.low_precision.defined() ? static_cast<std::uint16_t*>(b.low_precision.data_ptr()) : nullptr;
  at::parallel_for(0, b.parameters.numel(), 32768, [=](std::int64_t begin, std::int64_t end) {
    for (std::int64_t at = begin; at < end; at += 4096) {
      const std::int64_t n = std::min<std::int64_t>(4096, end - at);
      if (wide)
        touch_rows(p + at, wide + at, m + at, v + at, n);
      else
        touch_rows(p + at, narrow + at, m + at, v + at, n);
      if (low) copy_rows(low + at, p + at, n);
    }
  });
}

}  // namespace

int main(int argc, char** argv) {
  std::int64_t elements = 32 << 20;
  int repeats = 7;
  for (int at = 1; at + 1 < argc; ++at) {
    if (std::strcmp(argv[at], "--elements") == 0) elements = std::max(1LL, std::atoll(argv[at + 1]));
    if (std::strcmp(argv[at], "--repeats") == 0) repeats = std::max(1, std::atoi(argv[at + 1]));
  }
  const int all = at::get_num_threads();
  std::printf("%lld elements, best of %d\n", static_cast<long long>(elements), repeats);
  std::printf("%-28s %7s %14s %9s %9s %9s\n", "gradient, copy", "threads", "Melements/s", "GB/s", "limit", "of it");
  for (const Case& one : {Case{"fp32, none", at::kFloat, false}, Case{"bf16, none", at::kBFloat16, false},
                          Case{"fp32, bf16", at::kFloat, true}, Case{"bf16, bf16", at::kBFloat16, true}}) {
    AdamBuffers buffers{.parameters = at::randn({elements}),
                        .gradients = at::randn({elements}).to(one.gradient),
                        .exp_avg = at::zeros({elements}),
                        .exp_avg_sq = at::zeros({elements})};
    if (one.low_precision) buffers.low_precision = at::zeros({elements}, at::TensorOptions(at::kBFloat16));
    for (int threads = 1; threads <= all; ++threads) {
      at::set_num_threads(threads);
      double ours = std::numeric_limits<double>::infinity(), limit = ours;
      for (int repeat = 0; repeat < repeats; ++repeat) {
        buffers.parameters.fill_(1), buffers.exp_avg.zero_(), buffers.exp_avg_sq.zero_();  // undo what the limit's loop did
        auto start = now_ns();
        adam_(buffers, {.lr = 3e-4, .weight_decay = 0.1, .step = repeat + 1});
        ours = std::min(ours, seconds_since(start));
        start = now_ns();
        touch(buffers);
        limit = std::min(limit, seconds_since(start));
      }
      const double count = static_cast<double>(elements);
      std::printf("%-28s %7d %14.1f %9.1f %9.1f %8.0f%%\n", one.name, threads, count / ours * 1e-6,
                  count * one.bytes() / ours * 1e-9, count * one.bytes() / limit * 1e-9, 100 * limit / ours);
    }
  }
}
