#include "bonfire/cuda/scaled_weight.h"

#include "bonfire/cuda/device.cuh"
#include "bonfire/cuda/eight_bits.cuh"
#include "bonfire/cuda/launch.cuh"

namespace bonfire::cuda {
namespace {

constexpr int threads = 256;
constexpr int width = 4;  // elements that a thread reads at once
constexpr int at_once = 8;
constexpr std::int64_t stretch = 32 * width * at_once;  // of a warp

__device__ std::int64_t scale_of(const WeightPartMemory& a, std::int64_t element) {
  return a.length + a.first <= a.each ? 0 : (a.first + element) / a.each;
}

__global__ void __launch_bounds__(threads) note_magnitudes_kernel(WeightPartMemory a) {
  wait_for_kernels_before();
  const std::int64_t warp = (static_cast<std::int64_t>(blockIdx.x) * threads + threadIdx.x) / 32;
  const std::int64_t begin = warp * stretch, end = min(begin + stretch, a.length);
  if (begin >= end) return;
  const std::int64_t first_scale = scale_of(a, begin);
  const bool alone = first_scale == scale_of(a, end - 1);
  float largest[at_once] = {};
#pragma unroll
  for (int i = 0; i < at_once; ++i) {
    const std::int64_t at = begin + (i * 32 + threadIdx.x % 32) * width;
    if (at >= end) continue;
    const float4 v = *reinterpret_cast<const float4*>(a.x + at);
    largest[i] = fmaxf(fmaxf(magnitude_of(v.x), magnitude_of(v.y)), fmaxf(magnitude_of(v.z), magnitude_of(v.w)));
  }
  if (!alone) {
#pragma unroll
    for (int i = 0; i < at_once; ++i) {
      const std::int64_t at = begin + (i * 32 + threadIdx.x % 32) * width;
      if (at < end) raise(a.magnitudes + scale_of(a, at), largest[i]);
    }
    return;
  }
  float most = 0;
#pragma unroll
  for (int i = 0; i < at_once; ++i) most = fmaxf(most, largest[i]);
  note_largest(most, a.magnitudes + first_scale);
}

__global__ void __launch_bounds__(threads) round_scaled_kernel(WeightPartMemory a) {
  wait_for_kernels_before();
  const std::int64_t begin = static_cast<std::int64_t>(blockIdx.x) * threads * width * at_once + threadIdx.x * width;
#pragma unroll
  for (int i = 0; i < at_once; ++i) {
    const std::int64_t at = begin + static_cast<std::int64_t>(i) * threads * width;
    if (at >= a.length) return;
    const float4 v = *reinterpret_cast<const float4*>(a.x + at);
    const float scale = scale_to_eight_bits<false>(a.magnitudes[scale_of(a, at)]);
    *reinterpret_cast<std::uint32_t*>(static_cast<unsigned char*>(a.out) + at) =
        eight_bits<false>(scaled(v.x, scale), scaled(v.y, scale), scaled(v.z, scale), scaled(v.w, scale));
  }
}

__global__ void __launch_bounds__(threads) transpose_kernel(TransposeMemory a) {
  wait_for_kernels_before();
  __shared__ TurnedTile turned;
  const std::int64_t column = static_cast<std::int64_t>(blockIdx.x) * tile,
                     row = static_cast<std::int64_t>(blockIdx.y) * tile;
  const int lane = threadIdx.x % 16;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int group = half * 16 + threadIdx.x / 16;
    const std::int64_t r = row + 4 * group, c = column + 8 * lane;
    if (r >= a.rows || c >= a.columns) continue;
    std::uint32_t low[4], high[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint2 v = *reinterpret_cast<const uint2*>(static_cast<const unsigned char*>(a.x) + (r + i) * a.columns + c);
      low[i] = v.x;
      high[i] = v.y;
    }
    turned.put(lane, group, low, high);
  }
  __syncthreads();
  turned.store(static_cast<unsigned char*>(a.out), a.rows, a.columns, row, column);
}

unsigned blocks_for(std::int64_t elements, std::int64_t of_a_block) {
  return static_cast<unsigned>((elements + of_a_block - 1) / of_a_block);
}

}  // namespace

void launch_note_magnitudes(const WeightPartMemory& memory, cudaStream_t stream) {
  launch(note_magnitudes_kernel, {blocks_for(memory.length, threads / 32 * stretch), threads}, stream, memory);
}

void launch_round_scaled(const WeightPartMemory& memory, cudaStream_t stream) {
  launch(round_scaled_kernel, {blocks_for(memory.length, threads * width * at_once), threads}, stream, memory);
}

void launch_transpose(const TransposeMemory& memory, cudaStream_t stream) {
  const dim3 grid(blocks_for(memory.columns, tile), blocks_for(memory.rows, tile));
  launch(transpose_kernel, {grid, threads}, stream, memory);
}

}  // namespace bonfire::cuda
