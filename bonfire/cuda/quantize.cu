#include "bonfire/cuda/quantize.h"

#include <cuda_fp8.h>

#include "bonfire/cuda/device.cuh"

namespace bonfire::cuda {
namespace {

constexpr int threads = 256;
constexpr int width = 8;         // elements that a thread reads at once
constexpr int tile = 128;        // rows and columns of a block
constexpr int words = tile / 4;  // of four rows of one column

// Magnitudes are not negative, so their bits are in the order of the numbers.
__device__ void note_largest(float own, float* to) {
  for (int distance = 16; distance > 0; distance /= 2) own = fmaxf(own, __shfl_xor_sync(0xffffffffu, own, distance));
  // Looking first spares almost everybody the queue.
  if (threadIdx.x % 32 == 0 && own > *static_cast<volatile float*>(to))
    atomicMax(reinterpret_cast<int*>(to), __float_as_int(own));
}

template <bool wide_range>
__device__ float scale_for(float magnitude) {
  return magnitude > 0 ? (wide_range ? 57344.0f : 448.0f) / magnitude : 1.0f;
}

template <bool wide_range>
__device__ std::uint32_t eight_bits(float a, float b) {
  return __nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, wide_range ? __NV_E5M2 : __NV_E4M3);
}

template <class T>
struct Quantize {
  const T* x;
  unsigned char *values, *transposed;
  float *inverse, *history, *measured;
  int length, now, next;
  const std::int64_t* later;
  std::int64_t rows, columns;
};

// A thread turns four rows of eight columns at a time: two words of every row, and of every column one, which goes through
// shared memory. There the words of a column are exchanged in a way that keeps writers and readers off each other's banks.
template <class T, bool wide_range>
__global__ void __launch_bounds__(threads) quantize_kernel(Quantize<T> a) {
  __shared__ std::uint32_t turned[tile][words];
  if (a.later) {
    const int shift = static_cast<int>(*a.later % a.length);
    a.now = (a.now + shift) % a.length;
    a.next = (a.next + shift) % a.length;
  }
  float magnitude = 0;
  if (a.measured) {
    magnitude = *a.measured;
  } else {
    for (int i = 0; i < a.length; ++i)
      if (i != a.now && i != a.next) magnitude = fmaxf(magnitude, a.history[i]);
  }
  const float scale = scale_for<wide_range>(magnitude);
  if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) {
    *a.inverse = 1.0f / scale;
    if (a.next != a.now) a.history[a.next] = 0;
  }
  const std::int64_t column = static_cast<std::int64_t>(blockIdx.x) * tile,
                     row = static_cast<std::int64_t>(blockIdx.y) * tile;
  const int lane = threadIdx.x % 16;
  float largest = 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int group = half * 16 + threadIdx.x / 16;  // of four rows
    const std::int64_t r = row + 4 * group, c = column + width * lane;
    if (r >= a.rows || c >= a.columns) continue;
    Pack<T, width> x[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = pack_at<T, width>(a.x + (r + i) * a.columns + c, 0);
    std::uint32_t low[4], high[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float v[width];
#pragma unroll
      for (int j = 0; j < width; ++j) {
        v[j] = load(x[i].at[j]);
        largest = fmaxf(largest, fabsf(v[j]));
        v[j] *= scale;
      }
      low[i] = eight_bits<wide_range>(v[0], v[1]) | eight_bits<wide_range>(v[2], v[3]) << 16;
      high[i] = eight_bits<wide_range>(v[4], v[5]) | eight_bits<wide_range>(v[6], v[7]) << 16;
      if (a.values) *reinterpret_cast<uint2*>(a.values + (r + i) * a.columns + c) = make_uint2(low[i], high[i]);
    }
    if (a.transposed) {
#pragma unroll
      for (int j = 0; j < width; ++j) {
        const auto& from = j < 4 ? low : high;
        const int at = j % 4;
        std::uint32_t word = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) word |= (from[i] >> (8 * at) & 0xffu) << (8 * i);
        turned[width * lane + j][group ^ (2 * lane)] = word;
      }
    }
  }
  if (a.history) note_largest(largest, a.history + a.now);
  if (!a.transposed) return;
  __syncthreads();
  // Sixteen rows of a column are one store.
#pragma unroll
  for (int i = threadIdx.x; i < tile * words / 4; i += threads) {
    const int c = i / (words / 4), chunk = i % (words / 4), exchanged = c / width;
    if (column + c >= a.columns || row + 16 * chunk >= a.rows) continue;
    uint4 found = *reinterpret_cast<const uint4*>(&turned[c][4 * (chunk ^ (exchanged / 2))]);
    if (exchanged % 2) found = make_uint4(found.z, found.w, found.x, found.y);
    *reinterpret_cast<uint4*>(a.transposed + (column + c) * a.rows + row + 16 * chunk) = found;
  }
}

template <class T, bool wide_range>
__global__ void __launch_bounds__(threads) quantize_rows_kernel(Quantize<T> a) {
  __shared__ float shared[threads / 32];
  const T* x = a.x + blockIdx.x * a.columns;
  const std::int64_t packs = a.columns / width;
  float largest = 0;
  for (std::int64_t i = threadIdx.x; i < packs; i += threads) {
    const Pack<T, width> v = pack_at<T, width>(x, i);
#pragma unroll
    for (int j = 0; j < width; ++j) largest = fmaxf(largest, fabsf(load(v.at[j])));
  }
  for (int distance = 16; distance > 0; distance /= 2)
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, distance));
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = largest;
  __syncthreads();
  for (const float other : shared) largest = fmaxf(largest, other);
  const float scale = scale_for<wide_range>(largest);
  if (threadIdx.x == 0) a.inverse[blockIdx.x] = 1.0f / scale;
  for (std::int64_t i = threadIdx.x; i < packs; i += threads) {
    const Pack<T, width> v = pack_at<T, width>(x, i);
    const auto two = [&](int j) { return eight_bits<wide_range>(load(v.at[j]) * scale, load(v.at[j + 1]) * scale); };
    reinterpret_cast<uint2*>(a.values + blockIdx.x * a.columns)[i] =
        make_uint2(two(0) | two(2) << 16, two(4) | two(6) << 16);
  }
}

template <class T>
__global__ void __launch_bounds__(threads) magnitude_kernel(const T* x, std::int64_t packs, float* to) {
  float largest = 0;
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * threads;
#pragma unroll 4
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * threads + threadIdx.x; i < packs; i += stride) {
    const Pack<T, width> v = pack_at<T, width>(x, i);
#pragma unroll
    for (int j = 0; j < width; ++j) largest = fmaxf(largest, fabsf(load(v.at[j])));
  }
  note_largest(largest, to);
}

template <class Body>
void with_narrow(const QuantizeMemory& memory, const Body& body) {
  if (memory.type == Element::f16)
    body(__half{});
  else
    body(__nv_bfloat16{});
}

template <class T>
Quantize<T> arguments(const QuantizeMemory& memory) {
  return {static_cast<const T*>(memory.x),
          static_cast<unsigned char*>(memory.values),
          static_cast<unsigned char*>(memory.transposed),
          memory.inverse,
          memory.history,
          memory.measured,
          memory.length,
          memory.now,
          memory.next,
          memory.later,
          memory.rows,
          memory.columns};
}

}  // namespace

void launch_quantize(const QuantizeMemory& memory, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>((memory.columns + tile - 1) / tile),
                  static_cast<unsigned>((memory.rows + tile - 1) / tile));
  with_narrow(memory, [&](auto t) {
    using T = decltype(t);
    if (memory.wide_range)
      quantize_kernel<T, true><<<grid, threads, 0, stream>>>(arguments<T>(memory));
    else
      quantize_kernel<T, false><<<grid, threads, 0, stream>>>(arguments<T>(memory));
  });
}

void launch_quantize_rows(const QuantizeMemory& memory, cudaStream_t stream) {
  const auto rows = static_cast<unsigned>(memory.rows);
  with_narrow(memory, [&](auto t) {
    using T = decltype(t);
    if (memory.wide_range)
      quantize_rows_kernel<T, true><<<rows, threads, 0, stream>>>(arguments<T>(memory));
    else
      quantize_rows_kernel<T, false><<<rows, threads, 0, stream>>>(arguments<T>(memory));
  });
}

void launch_magnitude(const QuantizeMemory& memory, cudaStream_t stream) {
  const std::int64_t packs = memory.rows * memory.columns / width;
  const auto blocks = std::clamp<std::int64_t>((packs + threads - 1) / threads, 1, 132 * 8);
  cudaMemsetAsync(memory.measured, 0, sizeof(float), stream);
  with_narrow(memory, [&](auto t) {
    using T = decltype(t);
    magnitude_kernel<T>
        <<<static_cast<unsigned>(blocks), threads, 0, stream>>>(static_cast<const T*>(memory.x), packs, memory.measured);
  });
}

}  // namespace bonfire::cuda
