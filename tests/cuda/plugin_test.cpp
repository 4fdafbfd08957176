#include <gtest/gtest.h>

#include <string>

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "bonfire/base/error.h"
#include "bonfire/base/version.h"
#include "bonfire/comm/cuda_plugin.h"
#include "bonfire/comm/device.h"
#include "bonfire/comm/join.h"

namespace bonfire::plugin_test {
namespace {

std::string in_build(const std::string& name) { return std::string(BONFIRE_BUILD_DIR) + "/" + name; }

void expect_refused(const CudaPluginOpening& opening, const std::string& words) {
  EXPECT_EQ(opening.plugin, nullptr);
  EXPECT_NE(opening.reason.find(words), std::string::npos) << opening.reason;
  EXPECT_EQ(opening.reason.find('\n'), std::string::npos) << opening.reason;
}

TEST(CudaPlugin, IsOpenedWhereItIsOfThisVersion) {
  const auto opening = open_cuda_plugin(in_build("libfake_plugin_same.so"));
  ASSERT_NE(opening.plugin, nullptr) << opening.reason;
  EXPECT_EQ(opening.plugin->device_count(), 3);
  EXPECT_EQ(opening.reason, "");
}

TEST(CudaPlugin, OfAnotherVersionIsRefused) {
  const auto opening = open_cuda_plugin(in_build("libfake_plugin_other.so"));
  expect_refused(opening, "0.0.0-other");
  expect_refused(opening, BONFIRE_VERSION);
}

TEST(CudaPlugin, WithoutTheEntryIsRefused) {
  expect_refused(open_cuda_plugin(in_build("libfake_plugin_nothing.so")), cuda_plugin_entry);
}

TEST(CudaPlugin, ThatIsMissingIsNamed) {
  const std::string path = in_build("there_is_no_such_plugin.so");
  expect_refused(open_cuda_plugin(path), path);
}

TEST(CudaPlugin, ThatIsNoLibraryIsNamed) { expect_refused(open_cuda_plugin(in_build("CMakeCache.txt")), "CMakeCache.txt"); }

// What a GPU of before Ampere is told: its name, what it has, and what would do.
TEST(CudaPlugin, RefusesGpusThatAreTooOld) {
  CudaPlugin plugin{.version = BONFIRE_VERSION,
                    .architectures = "90-real 80-virtual",
                    .device_count = [] { return 1; },
                    .device_info = [](int) { return GpuInfo{.name = "NVIDIA Tesla T4", .major = 7, .minor = 5}; }};
  EXPECT_EQ(unusable_gpu(plugin), "NVIDIA Tesla T4 (GPU 0) has compute capability 7.5; Bonfire needs 8.0 or newer");
  plugin.device_count = [] { return 2; };
  plugin.device_info = [](int index) {
    return index == 0 ? GpuInfo{.name = "NVIDIA A100", .major = 8, .minor = 0}
                      : GpuInfo{.name = "NVIDIA TITAN V", .major = 7, .minor = 0};
  };
  EXPECT_EQ(unusable_gpu(plugin),
            "NVIDIA TITAN V (GPU 1) has compute capability 7.0; Bonfire needs 8.0 or newer. CUDA_VISIBLE_DEVICES can leave "
            "it out");
  plugin.device_info = [](int) { return GpuInfo{.name = "NVIDIA GeForce RTX 5090", .major = 12, .minor = 0}; };
  EXPECT_EQ(unusable_gpu(plugin), "");
}

// A build for the GPUs of one machine says on another what it lacks, in place of CUDA's word for the first kernel.
TEST(CudaPlugin, RefusesGpusThatItHasNoCodeFor) {
  CudaPlugin plugin{.version = BONFIRE_VERSION,
                    .architectures = "90-real",
                    .device_count = [] { return 1; },
                    .device_info = [](int) { return GpuInfo{.name = "NVIDIA A100", .major = 8, .minor = 0}; }};
  EXPECT_EQ(unusable_gpu(plugin),
            "NVIDIA A100 (GPU 0) has compute capability 8.0, and this build has code for 90-real alone; build it beside the "
            "GPU, or with CUDA_ARCHS=80 or CUDA_ARCHS=all");
  plugin.device_count = [] { return 2; };
  plugin.device_info = [](int index) {
    return index == 0 ? GpuInfo{.name = "NVIDIA H200", .major = 9, .minor = 0}
                      : GpuInfo{.name = "NVIDIA B200", .major = 10, .minor = 0};
  };
  EXPECT_EQ(unusable_gpu(plugin),
            "NVIDIA B200 (GPU 1) has compute capability 10.0, and this build has code for 90-real alone; build it beside "
            "the GPU, or with CUDA_ARCHS=100 or CUDA_ARCHS=all. CUDA_VISIBLE_DEVICES can leave it out");

  struct Build {
    const char* architectures;
    int major, minor;
    bool runs;
  };
  plugin.device_count = [] { return 1; };
  for (const auto& [architectures, major, minor, runs] :
       {Build{"80-real", 8, 0, true},
        {"80-real", 8, 6, true},     // code of the same generation
        {"86-real", 8, 0, false},    // an older one of it
        {"80-real", 9, 0, false},    // of the next
        {"80-virtual", 9, 0, true},  // which PTX serves
        {"90-real 80-virtual", 12, 0, true},
        {"90-virtual", 8, 9, false},  // but not the one before
        {"90", 12, 0, true},
        {"100-real", 10, 3, true},
        {"100-real 90-real", 12, 0, false},
        {"80-real 89-real 90-real 100-real 120-real 120-virtual", 12, 1, true}}) {
    static GpuInfo gpu;
    gpu = {.name = "a GPU", .major = major, .minor = minor};
    plugin.architectures = architectures;
    plugin.device_info = [](int) { return gpu; };
    EXPECT_EQ(unusable_gpu(plugin).empty(), runs) << architectures << " on " << major << "." << minor;
  }
}

// The real one loads on a machine that has what CUDA's libraries need, with or without a GPU, and says what it misses on
// any other. What it must not miss is a symbol of ours or of torch's.
TEST(CudaPlugin, TheRealOneLoadsOrSaysWhatItLacks) {
#ifdef BONFIRE_CUDA_BUILT
  const auto opening = open_cuda_plugin(in_build("libbonfire_cuda.so"));
  if (opening.plugin) {
    EXPECT_STREQ(opening.plugin->version, BONFIRE_VERSION);
    EXPECT_STRNE(opening.plugin->architectures, "");
    EXPECT_EQ(opening.plugin->device_count() > 0, gpu_available());
  } else {
    expect_refused(opening, "cannot open shared object file");
  }
#else
  GTEST_SKIP() << "the CUDA plug-in was not built: no nvcc";
#endif
}

TEST(Device, AGpuIsAvailableOrTheReasonIsGiven) {
  EXPECT_EQ(gpu_available(), gpu_unavailable_reason().empty());
  EXPECT_EQ(gpu_available(), gpu_count() > 0);
  set_current(c10::Device(c10::kCPU));
  if (gpu_available()) {
    EXPECT_GT(gpu_info(0).memory_bytes, 0);
    EXPECT_GE(gpu_info(0).major, 8);
    EXPECT_FALSE(gpu_info(0).name.empty());
  } else {
    EXPECT_THROW(set_current(c10::Device(c10::kCUDA, 0)), Error);
  }
  EXPECT_THROW(gpu_info(gpu_count()), Error);
}

TEST(Device, RanksTakeTheGpusInTurn) {
  std::string said;
  const Log log([&](LogLevel, std::string_view words) { said += words; });
  const auto three = open_cuda_plugin(in_build("libfake_plugin_same.so"));
  for (int rank = 0; rank < 8; ++rank)
    EXPECT_EQ(device_in_turn(three, rank, log), c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(rank % 3)));
  EXPECT_EQ(device_in_turn({nullptr, "no NVIDIA driver"}, 0, log), c10::Device(c10::kCPU));
  EXPECT_EQ(said, "");
  // A GPU that is not used is no small thing.
  for (int rank = 0; rank < 2; ++rank)
    EXPECT_EQ(device_in_turn({nullptr, "the plug-in is old", true}, rank, log), c10::Device(c10::kCPU));
  EXPECT_EQ(said, "this machine has a GPU, but its ranks compute on the CPU: the plug-in is old");

  const int gpus = gpu_count();
  for (int rank = 0; rank < 2 * gpus; ++rank)
    EXPECT_EQ(local_device({.local_rank = rank}), c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(rank % gpus)));
  if (gpus == 0) {
    EXPECT_EQ(local_device({}, log), c10::Device(c10::kCPU));
  }
}

TEST(Gpu, SpinOccupiesItsStreamForAsLongAsAsked) {
  if (!gpu_available()) GTEST_SKIP() << gpu_unavailable_reason();
  const c10::impl::VirtualGuardImpl device(c10::kCUDA);
  const c10::Stream stream = device.getStreamFromGlobalPool(c10::Device(c10::kCUDA, 0));
  c10::Event begin(c10::kCUDA, c10::EventFlag::BACKEND_DEFAULT), end(c10::kCUDA, c10::EventFlag::BACKEND_DEFAULT);
  begin.record(stream);
  cuda_plugin().plugin->spin(stream, 20'000'000);
  end.record(stream);
  end.synchronize();
  // The GPU's clock that the kernel reads ticks in microseconds, the events' too.
  EXPECT_GE(begin.elapsedTime(end), 19.9);
}

}  // namespace
}  // namespace bonfire::plugin_test
