#pragma once

#include <cstdint>

#include "bonfire/cuda/device.cuh"
#include "bonfire/cuda/launch.cuh"

// Sums over rows that blocks have made parts of: which parts there are depends on shapes alone, so equal runs give equal
// bits.
namespace bonfire::cuda {
namespace {

constexpr int sum_width = 32, sum_height = 32;

// Up to three sums of as many parts, one after another.
template <class C>
struct Sums {
  C* of[3];
};

// of [columns] = sum of the parts, in their order for every residue modulo sum_height, and then over residues, two halves of
// them at a time.
template <class C>
__global__ void __launch_bounds__(sum_width* sum_height)
    sum_parts_kernel(const C* parts, Sums<C> sums, std::int64_t count, std::int64_t columns) {
  wait_for_kernels_before();
  __shared__ C shared[sum_height][sum_width + 1];
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * sum_width, column = first + threadIdx.x;
  parts += blockIdx.y * count * columns;
  C sum = 0;
  // Several on their way at once: one after another they would take longer than all the rest.
  constexpr int at_once = 8;
  for (std::int64_t part = threadIdx.y; part < count; part += at_once * sum_height) {
    C some[at_once];
#pragma unroll
    for (int i = 0; i < at_once; ++i) {
      const std::int64_t own = part + i * sum_height;
      some[i] = column < columns && own < count ? parts[own * columns + column] : C(0);
    }
#pragma unroll
    for (int i = 0; i < at_once; ++i) sum += some[i];
  }
  shared[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  sum = sum_of_warp(shared[threadIdx.x][threadIdx.y]);
  if (threadIdx.x == 0 && first + threadIdx.y < columns) sums.of[blockIdx.y][first + threadIdx.y] = sum;
}

template <class C>
void sum_parts(const C* parts, const Sums<C>& sums, std::int64_t count, std::int64_t columns, cudaStream_t stream) {
  const auto wanted = static_cast<unsigned>(sums.of[2] ? 3 : sums.of[1] ? 2 : 1);
  const dim3 grid(static_cast<unsigned>((columns + sum_width - 1) / sum_width), wanted);
  launch(sum_parts_kernel<C>, {grid, dim3(sum_width, sum_height)}, stream, parts, sums, count, columns);
}

}  // namespace
}  // namespace bonfire::cuda
