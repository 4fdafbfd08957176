#include "bonfire/cuda/spin.h"

#include "bonfire/cuda/launch.cuh"

namespace bonfire::cuda {
namespace {

__device__ std::int64_t global_nanoseconds() {
  std::int64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

// Sleeps between looks at the clock, so that one thread's waiting takes nothing from the others' computing.
__global__ void spin_kernel(std::int64_t nanoseconds) {
  wait_for_kernels_before();
  const std::int64_t end = global_nanoseconds() + nanoseconds;
  while (global_nanoseconds() < end) __nanosleep(200);
}

}  // namespace

void launch_spin(std::int64_t nanoseconds, cudaStream_t stream) { launch(spin_kernel, {1, 1}, stream, nanoseconds); }

}  // namespace bonfire::cuda
