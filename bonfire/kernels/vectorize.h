#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include <ATen/Parallel.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

// What the CPU kernels share: clones of a loop for each generation of x86-64, the types that loops compute in, and an
// exponential that vectorises.
namespace bonfire::cpu {

// One binary for every x86-64: the loader picks the clone that the machine can run. GCC cannot clone templates, so kernels
// are inlined templates with one cloned function per element type around them.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define BONFIRE_CLONES  // the resolvers would run before the sanitizer is ready
#else
#define BONFIRE_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#endif
#define BONFIRE_INLINE inline __attribute__((always_inline))

// Doubles compute in double, everything else in float.
template <class T>
struct Compute {
  using type = float;
};
template <>
struct Compute<double> {
  using type = double;
};
template <class T>
using compute_t = typename Compute<T>::type;

BONFIRE_INLINE float load(float x) { return x; }
BONFIRE_INLINE double load(double x) { return x; }
BONFIRE_INLINE float load(c10::BFloat16 x) { return std::bit_cast<float>(static_cast<std::uint32_t>(x.x) << 16); }
BONFIRE_INLINE float load(c10::Half x) { return static_cast<float>(x); }

template <class T>
BONFIRE_INLINE T store(compute_t<T> x) {
  if constexpr (std::is_same_v<T, c10::BFloat16>) {
    // Round to nearest even without a branch, so that the loop vectorises; NaN stays NaN.
    const std::uint32_t bits = std::bit_cast<std::uint32_t>(x);
    const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return c10::BFloat16(static_cast<std::uint16_t>(x == x ? rounded : 0x7fc0u), c10::BFloat16::from_bits());
  } else {
    return static_cast<T>(x);
  }
}

// exp(x) within 2 ulp for float; the library's for double. Below the smallest normal number the result is 0, above the
// largest infinity; not a number stays that.
BONFIRE_INLINE float exponential(float x) {
  constexpr float least = -87.3f, most = 88.7228317f;
  const float clamped = x < least ? least : (x > most ? most : x);
  const float shifted = clamped * 1.44269504088896341f + 12582912.0f;  // 1.5 * 2^23: rounds to an integer
  const float n = shifted - 12582912.0f;
  float r = clamped - n * 0.693359375f;
  r -= n * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  // Two steps, because 2^128 is no float: the largest results need n = 128.
  const auto exponent = std::bit_cast<std::int32_t>(shifted) - 0x4b400000;
  const std::int32_t half = exponent >> 1;
  const float first = std::bit_cast<float>((half + 127) << 23);
  const float second = std::bit_cast<float>((exponent - half + 127) << 23);
  const float value = p * first * second;
  const float bounded = x > most ? std::numeric_limits<float>::infinity() : value;
  return x < least ? 0.0f : (x == x ? bounded : x);
}
BONFIRE_INLINE double exponential(double x) { return std::exp(x); }

// Rows that are worth a thread of their own, for rows of this many elements.
inline std::int64_t grain(std::int64_t row_elements) {
  return std::max<std::int64_t>(1, 16384 / std::max<std::int64_t>(1, row_elements));
}

// Calls `body(T{})` with the element type of `tensor`; fails for types that no kernel knows.
template <class Body>
void dispatch_floating(c10::ScalarType type, const char* kernel, const Body& body) {
  switch (type) {
    case c10::ScalarType::Float: return body(float{});
    case c10::ScalarType::Double: return body(double{});
    case c10::ScalarType::BFloat16: return body(c10::BFloat16{});
    case c10::ScalarType::Half: return body(c10::Half{});
    default: TORCH_CHECK(false, "bonfire::", kernel, " knows fp32, fp64, bf16 and fp16, not ", c10::toString(type));
  }
}

}  // namespace bonfire::cpu
