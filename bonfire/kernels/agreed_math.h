#pragma once

// Numbers and formulas that code for CPUs and for GPUs must agree on, to the bit. No torch: .cu files include it.
#ifdef __CUDACC__
#define BONFIRE_ON_BOTH __host__ __device__ __forceinline__
#else
#define BONFIRE_ON_BOTH inline __attribute__((always_inline))
#endif

namespace bonfire {

// The largest number in eight bits: of e5m2 where `wide_range`, otherwise of e4m3. Both lose a little range to keep
// infinities or a not-a-number.
template <bool wide_range>
inline constexpr float largest_in_eight_bits = wide_range ? 57344.0f : 448.0f;

// No scale is larger: its reciprocal is a normal number.
inline constexpr float most_scale = 0x1p126f;

// What numbers are multiplied by so that this magnitude becomes the largest number in eight bits; 1 where nothing has one.
template <bool wide_range>
BONFIRE_ON_BOTH float scale_to_eight_bits(float magnitude) {
  if (!(magnitude > 0)) return 1.0f;
  const float scale = largest_in_eight_bits<wide_range> / magnitude;
  return scale < most_scale ? scale : most_scale;
}

// The derivative of x sigmoid(x), SwiGLU's gate. What it is multiplied with comes behind it, one after the other: a product
// of two large factors could pass the largest number on its way to a small one. C: a number, or a tensor of them.
template <class C>
BONFIRE_ON_BOTH C silu_slope(C x, C sigmoid) {
  return sigmoid * (1 + x * (1 - sigmoid));
}

}  // namespace bonfire
