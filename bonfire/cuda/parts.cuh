#pragma once

#include <cstdint>

// Sums over rows that blocks have made parts of: which parts there are depends on shapes alone, so equal runs give equal
// bits.
namespace bonfire::cuda {
namespace {

constexpr int sum_width = 16, sum_height = 64;

// Up to three sums of as many parts, one after another.
template <class C>
struct Sums {
  C* of[3];
};

// of [columns] = sum of the parts, in their order for every residue modulo sum_height, and then over residues.
template <class C>
__global__ void sum_parts_kernel(const C* parts, Sums<C> sums, std::int64_t count, std::int64_t columns) {
  __shared__ C shared[sum_height][sum_width + 1];
  const std::int64_t column = static_cast<std::int64_t>(blockIdx.x) * sum_width + threadIdx.x;
  parts += blockIdx.y * count * columns;
  C sum = 0;
  if (column < columns)
#pragma unroll 4
    for (std::int64_t part = threadIdx.y; part < count; part += sum_height) sum += parts[part * columns + column];
  shared[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || column >= columns) return;
  for (int y = 1; y < sum_height; ++y) sum += shared[y][threadIdx.x];
  sums.of[blockIdx.y][column] = sum;
}

template <class C>
void sum_parts(const C* parts, const Sums<C>& sums, std::int64_t count, std::int64_t columns, cudaStream_t stream) {
  const auto wanted = static_cast<unsigned>(sums.of[2] ? 3 : sums.of[1] ? 2 : 1);
  const dim3 grid(static_cast<unsigned>((columns + sum_width - 1) / sum_width), wanted);
  sum_parts_kernel<C><<<grid, dim3(sum_width, sum_height), 0, stream>>>(parts, sums, count, columns);
}

}  // namespace
}  // namespace bonfire::cuda
