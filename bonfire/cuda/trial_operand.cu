#include "bonfire/cuda/trial_operand.h"

#include <algorithm>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "bonfire/cuda/launch.cuh"

namespace bonfire::cuda {
namespace {

constexpr int threads = 256;

unsigned blocks_for(std::int64_t count) {
  return static_cast<unsigned>(std::clamp<std::int64_t>((count + threads - 1) / threads, 1, 2048));
}

__global__ void count_repeats_kernel(const std::uint32_t* words, std::int64_t count, unsigned long long* repeats) {
  wait_for_kernels_before();
  unsigned own = 0;
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * threads;
  for (std::int64_t i = 1 + static_cast<std::int64_t>(blockIdx.x) * threads + threadIdx.x; i < count; i += stride)
    own += words[i] == words[i - 1];
  own = __reduce_add_sync(0xffffffffu, own);
  if (threadIdx.x % 32 == 0) atomicAdd(repeats, static_cast<unsigned long long>(own));
}

// splitmix64.
__device__ std::uint64_t hash(std::uint64_t x) {
  x += 0x9E3779B97F4A7C15ull;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

__device__ double uniform(std::uint64_t number) {
  return static_cast<double>(static_cast<std::int64_t>(hash(number))) * 0x1p-63;
}

template <class T>
__device__ T rounded(double x) {
  if constexpr (sizeof(T) >= 4)
    return static_cast<T>(x);
  else
    return T(static_cast<float>(x));
}

template <class T>
__global__ void random_elements_kernel(T* to, std::int64_t count) {
  wait_for_kernels_before();
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * threads;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * threads + threadIdx.x; i < count; i += stride) {
    const auto number = 2 * static_cast<std::uint64_t>(i);
    to[i] = rounded<T>(uniform(number) + uniform(number + 1));
  }
}

template <class T>
void fill(void* to, std::int64_t count, cudaStream_t stream) {
  launch(random_elements_kernel<T>, {blocks_for(count), threads}, stream, static_cast<T*>(to), count);
}

}  // namespace

void launch_count_repeats(const std::uint32_t* words, std::int64_t count, std::uint64_t* repeats, cudaStream_t stream) {
  launch(count_repeats_kernel, {blocks_for(count), threads}, stream, words, count,
         reinterpret_cast<unsigned long long*>(repeats));
}

void launch_random_elements(void* to, std::int64_t count, TrialElement type, cudaStream_t stream) {
  switch (type) {
    case TrialElement::f32: return fill<float>(to, count, stream);
    case TrialElement::f64: return fill<double>(to, count, stream);
    case TrialElement::bf16: return fill<__nv_bfloat16>(to, count, stream);
    case TrialElement::f16: return fill<__half>(to, count, stream);
    case TrialElement::e4m3: return fill<__nv_fp8_e4m3>(to, count, stream);
    case TrialElement::e5m2: return fill<__nv_fp8_e5m2>(to, count, stream);
  }
}

}  // namespace bonfire::cuda
