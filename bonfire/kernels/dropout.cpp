#include "bonfire/kernels/dropout.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "bonfire/base/error.h"
#include "bonfire/kernels/backward_node.h"
#include "bonfire/kernels/operator.h"
#include "bonfire/kernels/vectorize.h"

namespace bonfire {
namespace {

using at::Tensor;
using cpu::compute_t;
using cpu::load;
using cpu::store;

constexpr std::int64_t kLanes = 64;  // blocks of four words at a time

// bonfire::Random::block for kLanes counters from `block` on, as a loop that vectorises.
BONFIRE_INLINE void philox_loop(std::uint64_t key, std::uint64_t block, std::uint32_t* __restrict words) {
#pragma omp simd
  for (std::int64_t lane = 0; lane < kLanes; ++lane) {
    const std::uint64_t counter = block + static_cast<std::uint64_t>(lane);
    std::uint32_t c0 = static_cast<std::uint32_t>(counter), c1 = static_cast<std::uint32_t>(counter >> 32), c2 = 0, c3 = 0;
    std::uint32_t k0 = static_cast<std::uint32_t>(key), k1 = static_cast<std::uint32_t>(key >> 32);
    for (int round = 0; round < 10; ++round) {
      const std::uint64_t p0 = std::uint64_t{0xD2511F53} * c0, p1 = std::uint64_t{0xCD9E8D57} * c2;
      c0 = static_cast<std::uint32_t>(p1 >> 32) ^ c1 ^ k0;
      c1 = static_cast<std::uint32_t>(p1);
      c2 = static_cast<std::uint32_t>(p0 >> 32) ^ c3 ^ k1;
      c3 = static_cast<std::uint32_t>(p0);
      k0 += 0x9E3779B9;
      k1 += 0xBB67AE85;
    }
    words[4 * lane] = c0;
    words[4 * lane + 1] = c1;
    words[4 * lane + 2] = c2;
    words[4 * lane + 3] = c3;
  }
}

BONFIRE_CLONES void philox(std::uint64_t key, std::uint64_t block, std::uint32_t* words) { philox_loop(key, block, words); }

template <class T>
void drop(const T* x, T* out, std::int64_t n, double p, std::uint64_t key, std::uint64_t first) {
  // Compared as 64-bit numbers, so that p close to 1 keeps its meaning.
  const auto threshold = static_cast<std::uint64_t>(p * 0x1p32);
  const auto scale = static_cast<compute_t<T>>(1 / (1 - p));
  constexpr std::uint64_t run = 4 * kLanes;
  std::uint32_t words[run];
  std::int64_t done = 0;
  while (done < n) {
    const std::uint64_t at = first + static_cast<std::uint64_t>(done), skip = at % run;
    const std::int64_t count = std::min<std::int64_t>(n - done, static_cast<std::int64_t>(run - skip));
    philox(key, (at - skip) / 4, words);
    for (std::int64_t i = 0; i < count; ++i)
      out[done + i] =
          store<T>(words[skip + static_cast<std::uint64_t>(i)] < threshold ? compute_t<T>(0) : load(x[done + i]) * scale);
    done += count;
  }
}

Tensor dropout_cpu(const Tensor& given, double p, std::int64_t key, std::int64_t first) {
  const Tensor x = given.contiguous();
  Tensor out = at::empty_like(x);
  cpu::dispatch_floating(x.scalar_type(), "dropout", [&](auto t) {
    using T = decltype(t);
    const T* in = x.const_data_ptr<T>();
    T* to = out.data_ptr<T>();
    at::parallel_for(0, x.numel(), 8192, [&](std::int64_t begin, std::int64_t end) {
      drop(in + begin, to + begin, end - begin, p, static_cast<std::uint64_t>(key),
           static_cast<std::uint64_t>(first + begin));
    });
  });
  return out;
}

// The mask comes from the host, so that every device drops the same elements.
Tensor dropout_composite(const Tensor& x, double p, std::int64_t key, std::int64_t first) {
  Tensor ones = at::empty(x.sizes(), x.options().device(at::kCPU)).fill_(1);
  return x.mul(dropout_cpu(ones, p, key, first).to(x.device()));
}

using Dropout = Tensor(const Tensor&, double, std::int64_t, std::int64_t);

Tensor call(const Tensor& x, const DropoutOptions& options) {
  return BONFIRE_OPERATOR("bonfire::dropout", Dropout)
      .call(x, options.p, static_cast<std::int64_t>(options.random.key()), options.first);
}

struct DropoutNode : BackwardNode {
  DropoutOptions options;
  torch::autograd::variable_list backward(const torch::autograd::variable_list& gradients) override {
    return {call(gradients[0], options)};
  }
};

}  // namespace

Tensor dropout(const Tensor& x, const DropoutOptions& options) {
  require(options.p >= 0 && options.p < 1, "dropout: the probability is {}; allowed: [0, 1)", options.p);
  if (options.p == 0) return x;
  auto node = make_node<DropoutNode>(x);
  Tensor out;
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    out = call(x, options);
  }
  if (node) {
    node->options = options;
    torch::autograd::set_history(out, node);
  }
  return out;
}

TORCH_LIBRARY_IMPL(bonfire, CPU, m) { m.impl("dropout", dropout_cpu); }
TORCH_LIBRARY_IMPL(bonfire, CompositeExplicitAutograd, m) { m.impl("dropout", dropout_composite); }

}  // namespace bonfire
