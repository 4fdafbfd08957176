#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <type_traits>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "bonfire/cuda/element.h"

// What kernels share: the types that they compute in, loads and stores of several elements at once, and sums over warps.
namespace bonfire::cuda {

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

__device__ inline float load(float x) { return x; }
__device__ inline double load(double x) { return x; }
__device__ inline float load(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline float load(__half x) { return __half2float(x); }

template <class T>
__device__ T store(compute_t<T> x);
template <>
__device__ inline float store<float>(float x) {
  return x;
}
template <>
__device__ inline double store<double>(double x) {
  return x;
}
template <>
__device__ inline __nv_bfloat16 store<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}
template <>
__device__ inline __half store<__half>(float x) {
  return __float2half_rn(x);
}

// Elements that a thread moves at once. A width of 1 is for memory that is not aligned.
template <class T, int width>
struct alignas(sizeof(T) * width) Pack {
  T at[width];
};
// The widest single access is 16 bytes.
template <class T>
constexpr int full_width = 16 / static_cast<int>(sizeof(T));

// Element j, which is known when this is compiled. Bits of bf16 are the upper ones of a float: one instruction for each,
// where taking a word apart first takes two.
template <class T, int width>
__device__ compute_t<T> element(const Pack<T, width>& pack, int j) {
  if constexpr (std::is_same_v<T, __nv_bfloat16> && width % 2 == 0) {
    unsigned word;
    memcpy(&word, &pack.at[j / 2 * 2], sizeof(word));
    return __uint_as_float(j % 2 ? word & 0xffff0000u : word << 16);
  } else {
    return load(pack.at[j]);
  }
}

template <class T, int width>
__device__ const Pack<T, width>& pack_at(const T* data, std::int64_t index) {
  return reinterpret_cast<const Pack<T, width>*>(data)[index];
}
template <class T, int width>
__device__ Pack<T, width>& pack_at(T* data, std::int64_t index) {
  return reinterpret_cast<Pack<T, width>*>(data)[index];
}

// The same for what is not read again soon: it makes way in the caches first.
template <class T, int width>
__device__ Pack<T, width> read_once(const T* data, std::int64_t index) {
  using P = Pack<T, width>;
  if constexpr (sizeof(P) == 16) {
    const int4 words = __ldcs(reinterpret_cast<const int4*>(data) + index);
    return *reinterpret_cast<const P*>(&words);
  } else {
    return pack_at<T, width>(data, index);
  }
}
template <class T, int width>
__device__ void write_once(T* data, std::int64_t index, const Pack<T, width>& pack) {
  if constexpr (sizeof(pack) == 16)
    __stcs(reinterpret_cast<int4*>(data) + index, *reinterpret_cast<const int4*>(&pack));
  else
    pack_at<T, width>(data, index) = pack;
}

// Keeps the compiler from holding a pack unpacked, in twice the registers, where it is used again later.
template <class T, int width>
__device__ void stay_packed(Pack<T, width>& pack) {
  if constexpr (sizeof(pack) % 4 == 0) {
    auto* words = reinterpret_cast<unsigned*>(&pack);
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(pack) / 4); ++i) asm volatile("" : "+r"(words[i]));
  }
}

// Exponentials and division: the quick ones where the result is rounded to two bytes anyway.
template <class T>
__device__ compute_t<T> power_of_two(compute_t<T> x) {
  if constexpr (sizeof(T) == 2) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
  } else {
    return exp2(x);
  }
}
// 1 / (1 + 2^-x)
template <class T>
__device__ compute_t<T> logistic_of_two(compute_t<T> x) {
  const compute_t<T> below = compute_t<T>(1) + power_of_two<T>(-x);
  if constexpr (sizeof(T) == 2) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(below));
    return y;
  } else {
    return compute_t<T>(1) / below;
  }
}
template <class C>
constexpr C log2e = C(1.4426950408889634073599246810019);
template <class T>
__device__ compute_t<T> sigmoid(compute_t<T> x) {
  return logistic_of_two<T>(log2e<compute_t<T>> * x);
}

// gelu(x) = x * sigmoid(2 u) with u = sqrt(2 / pi) (x + 0.044715 x^3), because 1 + tanh(u) = 2 sigmoid(2 u).
template <class T>
struct Gelu {
  using C = compute_t<T>;
  C value, slope;
  __device__ explicit Gelu(C x) {
    constexpr C k = C(1.5957691216057307117597842397375), cubic = C(0.044715);
    // At 32 the logistic is 0 or 1 in every type. A square that goes on to infinity would make 0 times infinity of the
    // slope.
    const C square = min(x * x, C(1024)), s = logistic_of_two<T>(x * (k * log2e<C> + k * cubic * log2e<C> * square));
    value = x * s;
    slope = s + (s - s * s) * x * (k + C(3) * k * cubic * square);
  }
};

// The same sum in all lanes.
template <class C>
__device__ C sum_of_warp(C value) {
  for (int distance = 16; distance > 0; distance /= 2) value += __shfl_xor_sync(0xffffffffu, value, distance);
  return value;
}

template <class Body>
void with_type(Element type, const Body& body) {
  switch (type) {
    case Element::f32: return body(float{});
    case Element::f64: return body(double{});
    case Element::bf16: return body(__nv_bfloat16{});
    case Element::f16: return body(__half{});
  }
}

inline bool aligned(std::initializer_list<const void*> pointers, std::size_t bytes) {
  return std::all_of(pointers.begin(), pointers.end(),
                     [&](const void* p) { return reinterpret_cast<std::uintptr_t>(p) % bytes == 0; });
}

}  // namespace bonfire::cuda
