#pragma once

#include <cstddef>
#include <utility>

#include <cuda_runtime.h>

#include "bonfire/cuda/gpu.h"

// How kernels of ours begin: a kernel may be brought to the multiprocessors while the one before it on the stream comes to
// its end, which takes some microseconds off every one of them. All it may do until then is wait.
namespace bonfire::cuda {

// The first thing that every thread of a kernel that `launch` starts does, whatever it does next: that a kernel has come to
// its end says then that all before it have.
__device__ inline void wait_for_kernels_before() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");  // the next one may be brought as well
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

namespace {

// Whether the current device runs code of this file in which kernels wait: code that was made for it, not for an older one.
bool kernels_wait() {
  const Gpu gpu = current_gpu();
  const int own = 100 * gpu.major + 10 * gpu.minor;
  if (own < 900) return false;
  for (const int made_for : {__CUDA_ARCH_LIST__})
    if (made_for == own) return true;
  return false;
}

}  // namespace

struct LaunchShape {
  dim3 grid, block;
  std::size_t shared = 0;  // bytes of dynamic shared memory
  unsigned cluster = 1;    // blocks of one, along x
};

// REQUIRES: the kernel begins with wait_for_kernels_before. Errors are left for cudaGetLastError, but for shared memory that
// the GPU does not have: that throws.
template <class... Parameters, class... Arguments>
static void launch(void (*kernel)(Parameters...), const LaunchShape& shape, cudaStream_t stream, Arguments&&... arguments) {
  if (shape.shared > 0) allow_shared(reinterpret_cast<const void*>(kernel), shape.shared);
  cudaLaunchAttribute attributes[2];
  unsigned count = 0;
  if (kernels_wait()) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (shape.cluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count++].val.clusterDim = {shape.cluster, 1, 1};
  }
  cudaLaunchConfig_t config{};
  config.gridDim = shape.grid;
  config.blockDim = shape.block;
  config.dynamicSmemBytes = shape.shared;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = count;
  cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...);
}

}  // namespace bonfire::cuda
