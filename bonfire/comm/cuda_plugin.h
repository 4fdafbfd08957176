#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/util/intrusive_ptr.h>

#include "bonfire/base/api.h"
#include "bonfire/base/clock.h"
#include "bonfire/base/log.h"
#include "bonfire/comm/captured_work.h"
#include "bonfire/comm/device.h"

namespace c10d {
class Store;
}

namespace bonfire {

class Backend;

struct NcclOptions {
  std::string name;  // of the group, for messages
  c10::Device device = c10::Device(c10::kCUDA, 0);
  std::chrono::milliseconds timeout = std::chrono::minutes(10);  // of one collective
  bool high_priority = true;                                     // its stream goes before compute's
  bool first = true;        // of its World, with all ranks: they find out who shares a GPU, once for all communicators
  Log log = Log::silent();  // hears where ranks share a GPU
};

// What libbonfire_cuda.so offers. The library knows no CUDA: it opens the plug-in and calls it through this table.
struct CudaPlugin {
  // Stays first. Both sides must have been built as one: the table may differ between versions.
  const char* version = nullptr;
  // What ordinary kernels were compiled for, separated by spaces, as CMake names it: "90-real" is code for GPUs of compute
  // capability 9.0, "80-virtual" PTX from which the driver makes that of any GPU of 8.0 or newer, "90" both.
  const char* architectures = "";

  int (*device_count)() = nullptr;
  GpuInfo (*device_info)(int index) = nullptr;
  // Of the caching allocator; 0: no limit.
  void (*limit_memory)(int index, std::int64_t bytes) = nullptr;
  // For tests: kernels find no more shared memory for a block than other GPUs have; 0: all that there is.
  void (*limit_shared_memory)(int bytes) = nullptr;
  // For tests and measurements: whether blocks of a kernel draw what they work on (they do), or have fixed shares.
  void (*draw_shares)(bool drawn) = nullptr;
  // For measurements: cuBLASLt divides products among the multiprocessors that are left when others have so many; 0: among
  // all, which took less time alone and beside others (bench/results/gpu.md).
  void (*leave_multiprocessors)(int to_others) = nullptr;

  // Collective: one communicator over NCCL. REQUIRES: `store` is shared by exactly these ranks.
  std::shared_ptr<Backend> (*make_nccl)(c10::intrusive_ptr<c10d::Store> store, int rank, int size,
                                        const NcclOptions& options) = nullptr;

  // Stream: occupies `stream` for this long. An emulated link is a stream that does nothing else.
  void (*spin)(c10::Stream stream, Nanoseconds duration) = nullptr;

  std::unique_ptr<CapturedWork> (*make_captured_work)(c10::Device device) = nullptr;
};

// The name of the function in the plug-in that returns the table.
inline constexpr const char* cuda_plugin_entry = "bonfire_cuda_plugin";
using CudaPluginEntry = const CudaPlugin* (*)();

// A plug-in, or one line that says why there is none.
struct CudaPluginOpening {
  const CudaPlugin* plugin = nullptr;
  std::string reason;
  bool driver_shows_gpu = false;
};

// Opens the library at `path`. It stays open: torch cannot forget the operators that it registers.
BONFIRE_API CudaPluginOpening open_cuda_plugin(const std::string& path);

// Why a GPU that the plug-in shows cannot be used, in one line; empty where all can be.
BONFIRE_API std::string unusable_gpu(const CudaPlugin& plugin);

// The plug-in of this process: the one that the environment variable BONFIRE_CUDA_PLUGIN names, else the one beside
// libbonfire.so. Opened at the first question and only where the driver shows a GPU, since loading CUDA's libraries takes
// seconds. Torch remembers its first answer about CUDA, so this must be asked before torch is.
BONFIRE_API const CudaPluginOpening& cuda_plugin();

// The same, for those who cannot go on without. Throws Error with the reason.
BONFIRE_API const CudaPlugin& require_cuda_plugin();

// Which of the plug-in's GPUs is a rank's: they go round by local rank. The CPU where there is no plug-in; that is worth a
// warning, of one rank a machine, where there is a GPU.
BONFIRE_API c10::Device device_in_turn(const CudaPluginOpening& opening, int local_rank, const Log& log);

}  // namespace bonfire
