#pragma once

#include <cstdint>

// Sums over rows that blocks have made parts of: which parts there are depends on shapes alone, so equal runs give equal bits.
namespace bonfire::cuda {
namespace {

constexpr int sum_width = 32, sum_height = 32;

// out [columns] = sum of the parts, in their order for every residue modulo sum_height, and then over residues.
template <class C>
__global__ void sum_parts_kernel(const C* parts, C* out, std::int64_t count, std::int64_t columns) {
  __shared__ C sums[sum_height][sum_width + 1];
  const std::int64_t column = static_cast<std::int64_t>(blockIdx.x) * sum_width + threadIdx.x;
  C sum = 0;
  if (column < columns)
    for (std::int64_t part = threadIdx.y; part < count; part += sum_height) sum += parts[part * columns + column];
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || column >= columns) return;
  for (int y = 1; y < sum_height; ++y) sum += sums[y][threadIdx.x];
  out[column] = sum;
}

template <class C>
void sum_parts(const void* parts, void* out, std::int64_t count, std::int64_t columns, cudaStream_t stream) {
  sum_parts_kernel<C>
      <<<static_cast<unsigned>((columns + sum_width - 1) / sum_width), dim3(sum_width, sum_height), 0, stream>>>(
          static_cast<const C*>(parts), static_cast<C*>(out), count, columns);
}

}  // namespace
}  // namespace bonfire::cuda
