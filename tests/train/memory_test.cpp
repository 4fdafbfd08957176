#include "bonfire/train/memory.h"

#include <gtest/gtest.h>

#include <thread>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>

namespace bonfire {
namespace {

constexpr std::int64_t block = 1 << 20;

at::Tensor bytes(std::int64_t count) { return at::empty({count}, at::kByte); }

TEST(MemoryMeter, CountsWhatIsHeldAndItsPeak) {
  const auto before = bytes(block);
  const MemoryMeter meter(c10::kCPU);
  EXPECT_EQ(meter.current(), 0);
  auto a = bytes(block);
  {
    const auto b = bytes(2 * block);
    EXPECT_EQ(meter.current(), 3 * block);
  }
  EXPECT_EQ(meter.current(), block);
  EXPECT_EQ(meter.peak(), 3 * block);
  a.reset();
  EXPECT_EQ(meter.current(), 0);
  EXPECT_EQ(meter.peak(), 3 * block);
}

TEST(MemoryMeter, SeesEveryThread) {
  const MemoryMeter meter(c10::kCPU);
  at::Tensor made;
  std::thread([&] { made = bytes(block); }).join();
  EXPECT_EQ(meter.current(), block);
  made.reset();
  EXPECT_EQ(meter.current(), 0);
}

// Products in bf16 go through oneDNN, which takes memory from the same allocator by raw pointers.
TEST(MemoryMeter, ServesTheLibrariesBelowTorch) {
  const MemoryMeter meter(c10::kCPU);
  {
    const auto a = at::ones({64, 64}, at::kBFloat16);
    EXPECT_EQ(at::mm(a, a).sum().item<float>(), 64.0f * 64 * 64);
    const auto grown = at::ones({8}).resize_({1024});
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(grown.data_ptr()) % 64, 0u);
  }
  EXPECT_GE(meter.peak(), 2 * 64 * 64 * 2);
}

}  // namespace
}  // namespace bonfire
