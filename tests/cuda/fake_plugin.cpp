#include "bonfire/base/version.h"
#include "bonfire/comm/cuda_plugin.h"

#ifndef FAKE_PLUGIN_nothing
extern "C" BONFIRE_API const bonfire::CudaPlugin* bonfire_cuda_plugin() {
#ifdef FAKE_PLUGIN_same
  static constexpr bonfire::CudaPlugin plugin{.version = BONFIRE_VERSION, .device_count = [] { return 3; }};
#else
  static constexpr bonfire::CudaPlugin plugin{.version = "0.0.0-other"};
#endif
  return &plugin;
}
#endif
