#include "bonfire/cuda/gpu.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include <c10/cuda/CUDAException.h>

#include "bonfire/base/error.h"

namespace bonfire::cuda {
namespace {

std::atomic<int> most_shared = 0;
std::atomic<int> taken_by_others = 0;

int current_device() {
  int device = 0;
  C10_CUDA_CHECK(cudaGetDevice(&device));
  return device;
}

int attribute(cudaDeviceAttr which, int device) {
  int value = 0;
  C10_CUDA_CHECK(cudaDeviceGetAttribute(&value, which, device));
  return value;
}

// Of a kernel on a device.
struct SharedMemory {
  std::size_t own = 0;      // that its code declares
  std::size_t allowed = 0;  // beside that
};

}  // namespace

void limit_shared_memory(int bytes) { most_shared = bytes; }

void leave_multiprocessors(int to_others) { taken_by_others = to_others; }

int multiprocessors_beside_others() {
  const int taken = taken_by_others;
  return taken > 0 ? std::max(1, current_gpu().multiprocessors - taken) : 0;
}

Gpu current_gpu() {
  static const std::vector<Gpu> gpus = [] {
    int count = 0;
    C10_CUDA_CHECK(cudaGetDeviceCount(&count));
    std::vector<Gpu> all;
    for (int device = 0; device < count; ++device)
      all.push_back({.major = attribute(cudaDevAttrComputeCapabilityMajor, device),
                     .minor = attribute(cudaDevAttrComputeCapabilityMinor, device),
                     .multiprocessors = attribute(cudaDevAttrMultiProcessorCount, device),
                     .block_shared = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device)});
    return all;
  }();
  Gpu gpu = gpus.at(static_cast<std::size_t>(current_device()));
  if (const int most = most_shared; most > 0) gpu.block_shared = std::min(gpu.block_shared, most);
  return gpu;
}

void allow_shared(const void* kernel, std::size_t bytes) {
  // A kernel's code does not change, nor does what it was allowed become less.
  static std::mutex mutex;
  static std::map<std::pair<const void*, int>, SharedMemory> known;
  const int device = current_device();
  const std::lock_guard lock(mutex);
  const auto [found, is_new] = known.try_emplace({kernel, device});
  SharedMemory& memory = found->second;
  if (is_new) {
    cudaFuncAttributes attributes{};
    C10_CUDA_CHECK(cudaFuncGetAttributes(&attributes, kernel));
    memory = {attributes.sharedSizeBytes, static_cast<std::size_t>(attributes.maxDynamicSharedSizeBytes)};
  }
  const auto most = static_cast<std::size_t>(current_gpu().block_shared);
  require(memory.own + bytes <= most, "a kernel asks for {} bytes of shared memory; this GPU has {} for a block",
          memory.own + bytes, most);
  if (bytes <= memory.allowed) return;
  C10_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)));
  memory.allowed = bytes;
}

}  // namespace bonfire::cuda
