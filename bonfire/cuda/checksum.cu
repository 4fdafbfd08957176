#include "bonfire/cuda/checksum.h"

#include <algorithm>

#include "bonfire/cuda/launch.cuh"

namespace bonfire::cuda {
namespace {

constexpr int threads = 256;

__global__ void checksum_kernel(const std::uint32_t* words, std::int64_t count, unsigned long long* sum) {
  wait_for_kernels_before();
  unsigned long long own = 0;
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * threads;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * threads + threadIdx.x; i < count; i += stride)
    own += (words[i] + 1ull) * (2ull * static_cast<unsigned long long>(i) + 1ull) * 0x9E3779B97F4A7C15ull;
  atomicAdd(sum, own);
}

}  // namespace

void launch_checksum(const std::uint32_t* words, std::int64_t count, std::uint64_t* sum, cudaStream_t stream) {
  const auto blocks = std::clamp<std::int64_t>((count + threads - 1) / threads, 1, 2048);
  launch(checksum_kernel, {static_cast<unsigned>(blocks), threads}, stream, words, count,
         reinterpret_cast<unsigned long long*>(sum));
}

}  // namespace bonfire::cuda
