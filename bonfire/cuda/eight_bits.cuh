#pragma once

#include <cstdint>

#include <cuda_fp8.h>

#include "bonfire/kernels/agreed_math.h"

// What kernels share that write eight bits: scales, rounding, and the transpose of a tile. Scales and rounding are those of
// bonfire/kernels/eight_bits.h, which says why, to the bit.
namespace bonfire::cuda {

// What counts of x towards the largest magnitude: nothing where it is infinite or no number.
__device__ inline float magnitude_of(float x) {
  const float magnitude = fabsf(x);
  return magnitude <= 3.402823466e+38f ? magnitude : 0.0f;
}

// x times scale; no number where x is infinite, since rounding would stop it at the largest number.
__device__ inline float scaled(float x, float scale) { return fmaf(x, scale, x - x); }

template <bool wide_range>
__device__ std::uint32_t eight_bits(float a, float b) {
  return __nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, wide_range ? __NV_E5M2 : __NV_E4M3);
}

template <bool wide_range>
__device__ std::uint32_t eight_bits(float a, float b, float c, float d) {
  return eight_bits<wide_range>(a, b) | eight_bits<wide_range>(c, d) << 16;
}

// Magnitudes are not negative, so their bits are in the order of the numbers.
__device__ inline void raise(float* to, float own) {
  // Looking first spares almost everybody the queue.
  if (own > *static_cast<volatile float*>(to)) atomicMax(reinterpret_cast<int*>(to), __float_as_int(own));
}

__device__ inline float largest_of_warp(float own) {
  for (int distance = 16; distance > 0; distance /= 2) own = fmaxf(own, __shfl_xor_sync(0xffffffffu, own, distance));
  return own;
}

__device__ inline void note_largest(float own, float* to) {
  own = largest_of_warp(own);
  if (threadIdx.x % 32 == 0) raise(to, own);
}

constexpr int tile = 128;        // rows and columns that a block turns
constexpr int words = tile / 4;  // of four rows of one column

// A tile on its way to be transposed. A thread has four rows of eight columns at a time: two words of every row, and of
// every column one. The words of a column are exchanged in a way that keeps writers and readers off each other's banks.
struct TurnedTile {
  alignas(16) std::uint32_t at[tile][words];

  // `lane`: which eight columns; `group`: which four rows.
  __device__ void put(int lane, int group, const std::uint32_t (&low)[4], const std::uint32_t (&high)[4]) {
#pragma unroll
    for (int four = 0; four < 2; ++four) {
      const auto& from = four ? high : low;
      const int c = 8 * lane + 4 * four, to = group ^ (2 * lane);
      // Four words of four bytes, exchanged: first pairs of bytes, then pairs of pairs.
      const std::uint32_t upper01 = __byte_perm(from[0], from[1], 0x5140), upper23 = __byte_perm(from[2], from[3], 0x5140);
      const std::uint32_t lower01 = __byte_perm(from[0], from[1], 0x7362), lower23 = __byte_perm(from[2], from[3], 0x7362);
      at[c][to] = __byte_perm(upper01, upper23, 0x5410);
      at[c + 1][to] = __byte_perm(upper01, upper23, 0x7632);
      at[c + 2][to] = __byte_perm(lower01, lower23, 0x5410);
      at[c + 3][to] = __byte_perm(lower01, lower23, 0x7632);
    }
  }

  // All threads of the block, after they have met: the tile that begins at (row, column) of [rows, columns].
  __device__ void store(unsigned char* transposed, std::int64_t rows, std::int64_t columns, std::int64_t row,
                        std::int64_t column) const {
    // Sixteen rows of a column are one store.
    for (int i = threadIdx.x; i < tile * words / 4; i += blockDim.x) {
      const int c = i / (words / 4), chunk = i % (words / 4), exchanged = c / 8;
      if (column + c >= columns || row + 16 * chunk >= rows) continue;
      uint4 found = *reinterpret_cast<const uint4*>(&at[c][4 * (chunk ^ (exchanged / 2))]);
      if (exchanged % 2) found = make_uint4(found.z, found.w, found.x, found.y);
      *reinterpret_cast<uint4*>(transposed + (column + c) * rows + row + 16 * chunk) = found;
    }
  }
};

}  // namespace bonfire::cuda
