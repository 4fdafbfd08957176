#pragma once

#include <cstdint>
#include <string>

#include <c10/core/Device.h>

#include "bonfire/base/api.h"

namespace bonfire {

struct GpuInfo {
  std::string name;
  std::int64_t memory_bytes = 0;
  int major = 0;  // compute capability
  int minor = 0;
};

// Whether this process can compute on a GPU: there is a driver, a GPU that it may see, and the plug-in loads.
BONFIRE_API bool gpu_available();
// One line that says what is missing. Empty where a GPU is available.
BONFIRE_API std::string gpu_unavailable_reason();
// 0 where none is available.
BONFIRE_API int gpu_count();
// Throws Error where there is no such GPU.
BONFIRE_API GpuInfo gpu_info(int index);

// Makes `device` the current one of the calling thread. For the CPU there is nothing to do.
BONFIRE_API void set_current(c10::Device device);

// Waits until everything that was issued on `device` has ended. For the CPU there is nothing to wait for.
BONFIRE_API void synchronize(c10::Device device);

// Torch's allocator of this process takes no more than `bytes` of the GPU; 0: as much as there is. More is refused with
// torch's OutOfMemoryError. Throws Error where there is no such GPU.
BONFIRE_API void limit_gpu_memory(int index, std::int64_t bytes);

// Makes torch choose, for the whole process, algorithms that give equal bits in every run and full fp32 in convolutions.
// Some are slower; a program that wants two runs to agree calls it once at its start. Attention in bf16 and fp16 is not
// among them: its backward adds in an order that varies, unless torch is told to use deterministic algorithms everywhere.
BONFIRE_API void make_deterministic();

}  // namespace bonfire
