#include "bonfire/cuda/quantize.h"

#include "bonfire/cuda/device.cuh"
#include "bonfire/cuda/eight_bits.cuh"
#include "bonfire/cuda/launch.cuh"

namespace bonfire::cuda {
namespace {

constexpr int threads = 256;
constexpr int width = 8;  // elements that a thread reads at once

template <class T>
struct Quantize {
  const T* x;
  unsigned char *values, *transposed;
  float *inverse, *history, *measured;
  int length, now, next;
  const std::int64_t* later;
  std::int64_t rows, columns;
};

template <class T, bool wide_range, bool values, bool transposed>
__global__ void __launch_bounds__(threads) quantize_kernel(Quantize<T> a) {
  wait_for_kernels_before();
  __shared__ TurnedTile turned;
  if (a.later) {
    const int shift = static_cast<int>(*a.later % a.length);
    a.now = (a.now + shift) % a.length;
    a.next = (a.next + shift) % a.length;
  }
  float magnitude = 0;
  if (a.measured) {
    magnitude = *a.measured;
  } else {
    // All at once: one after another they would cost as much time as the tile.
    for (int i = threadIdx.x % 32; i < a.length; i += 32)
      if (i != a.now && i != a.next) magnitude = fmaxf(magnitude, a.history[i]);
    magnitude = largest_of_warp(magnitude);
  }
  const float scale = scale_to_eight_bits<wide_range>(magnitude);
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
        v[j] = element(x[i], j);
        largest = fmaxf(largest, magnitude_of(v[j]));
        v[j] = scaled(v[j], scale);
      }
      low[i] = eight_bits<wide_range>(v[0], v[1], v[2], v[3]);
      high[i] = eight_bits<wide_range>(v[4], v[5], v[6], v[7]);
      if constexpr (values) *reinterpret_cast<uint2*>(a.values + (r + i) * a.columns + c) = make_uint2(low[i], high[i]);
    }
    if constexpr (transposed) turned.put(lane, group, low, high);
  }
  if (a.history) note_largest(largest, a.history + a.now);
  if constexpr (!transposed) return;
  __syncthreads();
  turned.store(a.transposed, a.rows, a.columns, row, column);
}

template <class T, bool wide_range>
__global__ void __launch_bounds__(threads) quantize_rows_kernel(Quantize<T> a) {
  wait_for_kernels_before();
  __shared__ float shared[threads / 32];
  const T* x = a.x + blockIdx.x * a.columns;
  const std::int64_t packs = a.columns / width;
  float largest = 0;
  for (std::int64_t i = threadIdx.x; i < packs; i += threads) {
    const Pack<T, width> v = pack_at<T, width>(x, i);
#pragma unroll
    for (int j = 0; j < width; ++j) largest = fmaxf(largest, magnitude_of(element(v, j)));
  }
  largest = largest_of_warp(largest);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = largest;
  __syncthreads();
  for (const float other : shared) largest = fmaxf(largest, other);
  const float scale = scale_to_eight_bits<wide_range>(largest);
  if (threadIdx.x == 0) a.inverse[blockIdx.x] = 1.0f / scale;
  for (std::int64_t i = threadIdx.x; i < packs; i += threads) {
    const Pack<T, width> v = pack_at<T, width>(x, i);
    const auto two = [&](int j) {
      return eight_bits<wide_range>(scaled(element(v, j), scale), scaled(element(v, j + 1), scale));
    };
    reinterpret_cast<uint2*>(a.values + blockIdx.x * a.columns)[i] =
        make_uint2(two(0) | two(2) << 16, two(4) | two(6) << 16);
  }
}

template <class T>
__global__ void __launch_bounds__(threads) magnitude_kernel(const T* x, std::int64_t packs, float* to) {
  wait_for_kernels_before();
  float largest = 0;
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * threads;
#pragma unroll 4
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * threads + threadIdx.x; i < packs; i += stride) {
    const Pack<T, width> v = pack_at<T, width>(x, i);
#pragma unroll
    for (int j = 0; j < width; ++j) largest = fmaxf(largest, magnitude_of(element(v, j)));
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
  constexpr std::true_type yes;
  constexpr std::false_type no;
  with_narrow(memory, [&](auto t) {
    using T = decltype(t);
    const auto run = [&](auto wide_range, auto values, auto transposed) {
      launch(quantize_kernel<T, decltype(wide_range)::value, decltype(values)::value, decltype(transposed)::value>,
             {grid, threads}, stream, arguments<T>(memory));
    };
    const auto choose = [&](auto wide_range) {
      if (!memory.transposed)
        run(wide_range, yes, no);
      else
        memory.values ? run(wide_range, yes, yes) : run(wide_range, no, yes);
    };
    memory.wide_range ? choose(yes) : choose(no);
  });
}

void launch_quantize_rows(const QuantizeMemory& memory, cudaStream_t stream) {
  const auto rows = static_cast<unsigned>(memory.rows);
  with_narrow(memory, [&](auto t) {
    using T = decltype(t);
    if (memory.wide_range)
      launch(quantize_rows_kernel<T, true>, {rows, threads}, stream, arguments<T>(memory));
    else
      launch(quantize_rows_kernel<T, false>, {rows, threads}, stream, arguments<T>(memory));
  });
}

void launch_magnitude(const QuantizeMemory& memory, cudaStream_t stream) {
  const std::int64_t packs = memory.rows * memory.columns / width;
  // Several times as many as run at once: where others have some of the multiprocessors, none of them waits for long.
  const auto blocks = std::clamp<std::int64_t>((packs + threads - 1) / threads, 1, 132 * 32);
  cudaMemsetAsync(memory.measured, 0, sizeof(float), stream);
  with_narrow(memory, [&](auto t) {
    using T = decltype(t);
    launch(magnitude_kernel<T>, {static_cast<unsigned>(blocks), threads}, stream, static_cast<const T*>(memory.x), packs,
           memory.measured);
  });
}

}  // namespace bonfire::cuda
