#include <algorithm>

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>

#include "bonfire/base/api.h"
#include "bonfire/base/version.h"
#include "bonfire/comm/cuda_plugin.h"
#include "bonfire/cuda/captured_work.h"
#include "bonfire/cuda/drawn_shares.h"
#include "bonfire/cuda/gpu.h"
#include "bonfire/cuda/nccl_backend.h"
#include "bonfire/cuda/spin.h"

namespace bonfire::cuda {
namespace {

int device_count() { return c10::cuda::device_count(); }

GpuInfo device_info(int index) {
  cudaDeviceProp properties{};
  C10_CUDA_CHECK(cudaGetDeviceProperties(&properties, index));
  return {.name = properties.name,
          .memory_bytes = static_cast<std::int64_t>(properties.totalGlobalMem),
          .major = properties.major,
          .minor = properties.minor};
}

void limit_memory(int index, std::int64_t bytes) {
  const double all = static_cast<double>(device_info(index).memory_bytes);
  const double fraction = bytes > 0 ? std::min(1.0, static_cast<double>(bytes) / all) : 1.0;
  c10::cuda::CUDACachingAllocator::setMemoryFraction(fraction, static_cast<c10::DeviceIndex>(index));
}

void spin(c10::Stream stream, Nanoseconds duration) {
  launch_spin(duration, c10::cuda::CUDAStream(stream).stream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace
}  // namespace bonfire::cuda

extern "C" BONFIRE_API const bonfire::CudaPlugin* bonfire_cuda_plugin() {
  static constexpr bonfire::CudaPlugin plugin{
      .version = BONFIRE_VERSION,
      .architectures = BONFIRE_CUDA_ARCHITECTURES,
      .device_count = bonfire::cuda::device_count,
      .device_info = bonfire::cuda::device_info,
      .limit_memory = bonfire::cuda::limit_memory,
      .limit_shared_memory = bonfire::cuda::limit_shared_memory,
      .draw_shares = bonfire::cuda::draw_shares,
      .leave_multiprocessors = bonfire::cuda::leave_multiprocessors,
      .make_nccl = bonfire::cuda::make_nccl_backend,
      .spin = bonfire::cuda::spin,
      .make_captured_work = bonfire::cuda::make_cuda_graph,
  };
  return &plugin;
}
