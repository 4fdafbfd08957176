#include "bonfire/comm/reduce_parts.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <type_traits>

#include <ATen/Parallel.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include "bonfire/base/error.h"

// One clone of each loop for every generation of x86-64; a sanitizer is not ready yet when the loader picks one.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define BONFIRE_CLONES
#else
#define BONFIRE_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#endif
#define BONFIRE_INLINE inline __attribute__((always_inline))

namespace bonfire {
namespace {

using Parts = std::span<const void* const>;

template <class T>
using sum_t = std::conditional_t<sizeof(T) == 2, float, T>;

template <class T>
BONFIRE_INLINE sum_t<T> load(T x) {
  if constexpr (std::is_same_v<T, c10::BFloat16>)
    return std::bit_cast<float>(static_cast<std::uint32_t>(x.x) << 16);
  else
    return static_cast<sum_t<T>>(x);
}

template <class T>
BONFIRE_INLINE T store(sum_t<T> x) {
  if constexpr (std::is_same_v<T, c10::BFloat16>) {
    // To nearest even without a branch, so that the loop vectorises; NaN stays NaN.
    const auto bits = std::bit_cast<std::uint32_t>(x);
    const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return c10::BFloat16(static_cast<std::uint16_t>(x == x ? rounded : 0x7fc0u), c10::BFloat16::from_bits());
  } else {
    return static_cast<T>(x);
  }
}

// Elements whose sums stay in the first-level cache while one part after the other is added.
constexpr std::int64_t kBlock = 1024;

template <class T>
BONFIRE_INLINE void reduce_range(T* output, Parts parts, Reduce op, std::int64_t begin, std::int64_t end) {
  sum_t<T> sums[kBlock];
  for (std::int64_t at = begin; at < end; at += kBlock) {
    const std::int64_t length = std::min(kBlock, end - at);
    const T* first = static_cast<const T*>(parts[0]) + at;
    for (std::int64_t i = 0; i < length; ++i) sums[i] = load(first[i]);
    for (std::size_t part = 1; part < parts.size(); ++part) {
      const T* next = static_cast<const T*>(parts[part]) + at;
      if (op == Reduce::max)
        for (std::int64_t i = 0; i < length; ++i) {
          const auto x = load(next[i]);
          sums[i] = sums[i] > x || sums[i] != sums[i] ? sums[i] : x;  // a NaN stays, whoever had it
        }
      else
        for (std::int64_t i = 0; i < length; ++i) sums[i] += load(next[i]);
    }
    if (op == Reduce::average)
      for (std::int64_t i = 0; i < length; ++i) sums[i] /= static_cast<sum_t<T>>(parts.size());
    for (std::int64_t i = 0; i < length; ++i) output[at + i] = store<T>(sums[i]);
  }
}

// GCC cannot clone templates.
#define BONFIRE_REDUCE(T)                                                                               \
  BONFIRE_CLONES void reduce(T* output, Parts parts, Reduce op, std::int64_t begin, std::int64_t end) { \
    reduce_range(output, parts, op, begin, end);                                                        \
  }
BONFIRE_REDUCE(float)
BONFIRE_REDUCE(double)
BONFIRE_REDUCE(c10::BFloat16)
BONFIRE_REDUCE(c10::Half)
BONFIRE_REDUCE(std::int64_t)
#undef BONFIRE_REDUCE

template <class T>
void reduce_all(const at::Tensor& output, Parts parts, Reduce op) {
  constexpr std::int64_t kGrain = 16 * kBlock;
  T* to = output.mutable_data_ptr<T>();
  at::parallel_for(0, output.numel(), kGrain,
                   [&](std::int64_t begin, std::int64_t end) { reduce(to, parts, op, begin, end); });
}

}  // namespace

void reduce_parts(const at::Tensor& output, Parts parts, Reduce op) {
  switch (output.scalar_type()) {
    case at::kFloat: return reduce_all<float>(output, parts, op);
    case at::kDouble: return reduce_all<double>(output, parts, op);
    case at::kBFloat16: return reduce_all<c10::BFloat16>(output, parts, op);
    case at::kHalf: return reduce_all<c10::Half>(output, parts, op);
    case at::kLong: return reduce_all<std::int64_t>(output, parts, op);
    default: fail("dtype {} cannot be reduced", c10::toString(output.scalar_type()));
  }
}

}  // namespace bonfire
