#include "bonfire/train/memory.h"

#include <gtest/gtest.h>

#include <exception>
#include <thread>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>

namespace bonfire::memory_test {
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

TEST(MemoryCap, RefusesWhatPassesItAndNothingElse) {
  const auto before = bytes(4 * block);
  const MemoryMeter meter(c10::kCPU);
  {
    const MemoryCap cap(c10::kCPU, 3 * block);
    auto a = bytes(2 * block);
    try {
      bytes(block + 1);
      ADD_FAILURE() << "the cap was passed";
    } catch (const MemoryRefused& refused) {
      EXPECT_STREQ(refused.what(), "allocating 1.00 MiB on top of 2.00 MiB in use would exceed the limit of 3.00 MiB");
    }
    EXPECT_EQ(meter.current(), 2 * block) << "what was refused is not held";
    const auto b = bytes(block);
    EXPECT_THROW(bytes(1), MemoryRefused);
    a.reset();
    const auto c = bytes(2 * block);
    EXPECT_THROW(std::rethrow_exception([] {
                   std::exception_ptr thrown;
                   std::thread([&] {
                     try {
                       bytes(block);
                     } catch (...) {
                       thrown = std::current_exception();
                     }
                   }).join();
                   return thrown;
                 }()),
                 MemoryRefused)
        << "the cap holds for every thread";
    EXPECT_EQ(meter.peak(), 3 * block);
  }
  const auto more = bytes(8 * block);
  EXPECT_EQ(meter.current(), 8 * block);
  const MemoryCap none(c10::kCPU, 0);
  EXPECT_NO_THROW(bytes(64 * block));
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
}  // namespace bonfire::memory_test
