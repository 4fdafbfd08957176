#include "bonfire/comm/cuda_plugin.h"

#include <dlfcn.h>

#include <cstdlib>
#include <filesystem>
#include <sstream>
#include <string_view>
#include <utility>

#include "bonfire/base/error.h"
#include "bonfire/base/version.h"

namespace bonfire {
namespace {

// Says why the driver offers no GPU, or nothing where it does. Costs far less than loading CUDA's libraries to ask them.
std::string driver_problem() {
  void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!driver) return fmt::format("no NVIDIA driver ({})", dlerror());
  using Init = int (*)(unsigned);
  using Count = int (*)(int*);
  const auto init = reinterpret_cast<Init>(dlsym(driver, "cuInit"));
  const auto count_devices = reinterpret_cast<Count>(dlsym(driver, "cuDeviceGetCount"));
  if (!init || !count_devices) return "libcuda.so.1 is no NVIDIA driver: it has no cuInit";
  if (const int code = init(0); code != 0) return fmt::format("the NVIDIA driver does not start: cuInit says {}", code);
  int count = 0;
  if (const int code = count_devices(&count); code != 0) return fmt::format("cuDeviceGetCount says {}", code);
  if (count > 0) return {};
  const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
  return visible ? fmt::format("the driver shows no GPU (CUDA_VISIBLE_DEVICES is '{}')", visible)
                 : "the driver shows no GPU";
}

std::string plugin_path() {
  if (const char* named = std::getenv("BONFIRE_CUDA_PLUGIN"); named && *named) return named;
  Dl_info here{};
  dladdr(reinterpret_cast<const void*>(&open_cuda_plugin), &here);
  return std::filesystem::path(here.dli_fname).replace_filename("libbonfire_cuda.so");
}

CudaPluginOpening find() {
  if (auto problem = driver_problem(); !problem.empty()) return {nullptr, std::move(problem)};
  auto opening = open_cuda_plugin(plugin_path());
  if (opening.plugin) {
    std::string problem = unusable_gpu(*opening.plugin);
    if (opening.plugin->device_count() == 0) problem = "CUDA shows no GPU, though the driver does";
    if (!problem.empty()) opening = {nullptr, std::move(problem)};
  }
  opening.driver_shows_gpu = true;
  return opening;
}

// Code of one generation also runs on what came later in it, and PTX on all that came later.
bool has_code_for(const GpuInfo& gpu, const std::string& architectures) {
  std::istringstream words(architectures);
  for (std::string word; words >> word;) {
    const int number = std::stoi(word), major = number / 10, minor = number % 10;
    const bool no_ptx = word.ends_with("-real"), no_code = word.ends_with("-virtual");
    if (!no_code && gpu.major == major && gpu.minor >= minor) return true;
    if (!no_ptx && std::pair(gpu.major, gpu.minor) >= std::pair(major, minor)) return true;
  }
  return false;
}

}  // namespace

CudaPluginOpening open_cuda_plugin(const std::string& path) {
  if (!std::filesystem::exists(path)) {
    return {nullptr, fmt::format("there is no CUDA plug-in at {} (it is built where nvcc is found)", path)};
  }
  // Global: what torch's CUDA libraries register must be the process's, not the plug-in's own.
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL);
  if (!library) return {nullptr, fmt::format("the CUDA plug-in does not load: {}", dlerror())};
  const auto entry = reinterpret_cast<CudaPluginEntry>(dlsym(library, cuda_plugin_entry));
  if (!entry) return {nullptr, fmt::format("{} is no CUDA plug-in: it has no {}", path, cuda_plugin_entry)};
  const CudaPlugin* plugin = entry();
  if (std::string_view(plugin->version) != BONFIRE_VERSION) {
    return {nullptr,
            fmt::format("the CUDA plug-in {} is of version {}, this is Bonfire {}", path, plugin->version, BONFIRE_VERSION)};
  }
  return {plugin, {}};
}

std::string unusable_gpu(const CudaPlugin& plugin) {
  constexpr int oldest = 8;  // the generation of Ampere: the first that computes in bf16 and copies while it computes
  for (int index = 0; index < plugin.device_count(); ++index) {
    const GpuInfo gpu = plugin.device_info(index);
    const auto refusal = [&](const std::string& why) {
      return fmt::format("{} (GPU {}) has compute capability {}.{}{}{}", gpu.name, index, gpu.major, gpu.minor, why,
                         plugin.device_count() > 1 ? ". CUDA_VISIBLE_DEVICES can leave it out" : "");
    };
    if (gpu.major < oldest) return refusal(fmt::format("; Bonfire needs {}.0 or newer", oldest));
    if (!has_code_for(gpu, plugin.architectures))
      return refusal(
          fmt::format(", and this build has code for {} alone; build it beside the GPU, or with CUDA_ARCHS={}{} or "
                      "CUDA_ARCHS=all",
                      plugin.architectures, gpu.major, gpu.minor));
  }
  return {};
}

const CudaPluginOpening& cuda_plugin() {
  // A fact of the process, like torch's own registry of devices: there is no second one to ask.
  static const CudaPluginOpening opening = find();
  return opening;
}

c10::Device device_in_turn(const CudaPluginOpening& opening, int local_rank, const Log& log) {
  if (opening.plugin) return {c10::kCUDA, static_cast<c10::DeviceIndex>(local_rank % opening.plugin->device_count())};
  if (opening.driver_shows_gpu && local_rank == 0)
    log.warning("this machine has a GPU, but its ranks compute on the CPU: {}", opening.reason);
  return c10::kCPU;
}

std::unique_ptr<CapturedWork> make_captured_work(c10::Device device) {
  require(device.is_cuda(), "work on {} cannot be captured; allowed: GPUs", device.str());
  return require_cuda_plugin().make_captured_work(device);
}

const CudaPlugin& require_cuda_plugin() {
  const auto& opening = cuda_plugin();
  require(opening.plugin != nullptr, "no GPU can be used: {}", opening.reason);
  return *opening.plugin;
}

}  // namespace bonfire
