#include "bonfire/comm/device.h"

#include <ATen/Context.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "bonfire/base/error.h"
#include "bonfire/comm/cuda_plugin.h"

namespace bonfire {

bool gpu_available() { return cuda_plugin().plugin != nullptr; }

std::string gpu_unavailable_reason() { return cuda_plugin().reason; }

int gpu_count() { return gpu_available() ? cuda_plugin().plugin->device_count() : 0; }

GpuInfo gpu_info(int index) {
  const CudaPlugin& plugin = require_cuda_plugin();
  require(index >= 0 && index < plugin.device_count(), "GPU {} does not exist: this process sees {}", index,
          plugin.device_count());
  return plugin.device_info(index);
}

void limit_gpu_memory(int index, std::int64_t bytes) {
  const CudaPlugin& plugin = require_cuda_plugin();
  require(index >= 0 && index < plugin.device_count(), "GPU {} does not exist: this process sees {}", index,
          plugin.device_count());
  plugin.limit_memory(index, bytes);
}

void set_current(c10::Device device) {
  if (device.is_cpu()) return;
  require_cuda_plugin();
  c10::impl::VirtualGuardImpl(device.type()).setDevice(device);
}

void synchronize(c10::Device device) {
  if (!device.is_cpu()) c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
}

void make_deterministic() {
  auto& context = at::globalContext();
  context.setDeterministicCuDNN(true);
  context.setBenchmarkCuDNN(false);
  context.setAllowTF32CuDNN(false);
}

}  // namespace bonfire
