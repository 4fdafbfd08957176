#include "bonfire/train/memory.h"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstring>
#include <limits>

#include <ATen/ops/empty.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/alloc_cpu.h>

#include "bonfire/base/size.h"
#include "bonfire/comm/device.h"

namespace bonfire {
namespace {

// Each block is preceded by its size. The data pointer is its own context, because oneDNN takes raw pointers.
class CountingAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &release, c10::Device(c10::kCPU)};
    // Two threads may pass here at once and each stay below: a cap is no more exact than that.
    if (now_.load() + static_cast<std::int64_t>(bytes) > most_.load()) refuse(static_cast<std::int64_t>(bytes));
    auto* block = static_cast<std::byte*>(c10::alloc_cpu(bytes + header));
    std::memcpy(block, &bytes, sizeof bytes);
    void* data = block + header;
    c10::profiledCPUMemoryReporter().New(data, bytes);
    const auto now = now_.fetch_add(static_cast<std::int64_t>(bytes)) + static_cast<std::int64_t>(bytes);
    for (auto peak = peak_.load(); now > peak && !peak_.compare_exchange_weak(peak, now);) {
    }
    return {data, data, &release, c10::Device(c10::kCPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }

  static std::int64_t now() { return now_.load(); }
  static std::int64_t peak() { return peak_.load(); }
  static void forget_peak() { peak_.store(now_.load()); }
  // No more than so many bytes beyond those that are held; 0: no limit.
  static void limit(std::int64_t bytes) {
    base_.store(now_.load());
    most_.store(bytes > 0 ? now_.load() + bytes : no_limit);
  }

  static void install() {
    // Never destroyed: tensors may outlive every static.
    static auto* const installed = [] {
      auto* allocator = new CountingAllocator;
      c10::SetCPUAllocator(allocator, /*priority=*/100);
      return allocator;
    }();
    (void)installed;
  }

 private:
  static constexpr std::size_t header = 64;  // keeps torch's alignment

  [[noreturn]] static void refuse(std::int64_t bytes) {
    throw MemoryRefused(fmt::format("allocating {} on top of {} in use would exceed the limit of {}", format_bytes(bytes),
                                    format_bytes(now_.load() - base_.load()), format_bytes(most_.load() - base_.load())));
  }

  static void release(void* data) {
    if (!data) return;
    c10::profiledCPUMemoryReporter().Delete(data);
    auto* block = static_cast<std::byte*>(data) - header;
    std::size_t bytes = 0;
    std::memcpy(&bytes, block, sizeof bytes);
    now_.fetch_sub(static_cast<std::int64_t>(bytes));
    c10::free_cpu(block);
  }

  // Static like the allocator slot itself: a deleter is a plain function and knows nothing else.
  static inline std::atomic<std::int64_t> now_{0};
  static inline std::atomic<std::int64_t> peak_{0};
  static constexpr std::int64_t no_limit = std::numeric_limits<std::int64_t>::max();
  static inline std::atomic<std::int64_t> most_{no_limit};
  static inline std::atomic<std::int64_t> base_{0};  // what was held when the limit was set
};

std::int64_t allocated(c10::Device device, bool at_peak) {
  if (device.is_cpu()) return at_peak ? CountingAllocator::peak() : CountingAllocator::now();
  const auto stats = c10::getDeviceAllocator(device.type())->getDeviceStats(device.index());
  const auto& bytes = stats.allocated_bytes[static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE)];
  return at_peak ? bytes.peak : bytes.current;
}

}  // namespace

MemoryMeter::MemoryMeter(c10::Device device) : device_(device) {
  if (device.is_cpu()) {
    CountingAllocator::install();
    CountingAllocator::forget_peak();
  } else {
    at::empty({1}, at::TensorOptions().device(device));  // torch sets a device up at its first tensor
    c10::getDeviceAllocator(device.type())->resetPeakStats(device.index());
  }
  before_ = allocated(device_, /*at_peak=*/false);
}

std::int64_t MemoryMeter::current() const { return allocated(device_, /*at_peak=*/false) - before_; }
std::int64_t MemoryMeter::peak() const { return allocated(device_, /*at_peak=*/true) - before_; }

MemoryCap::MemoryCap(c10::Device device, std::int64_t bytes) : device_(device), bytes_(bytes) {
  if (bytes == 0) return;
  if (device.is_cpu()) {
    CountingAllocator::install();
    CountingAllocator::limit(bytes);
  } else {
    limit_gpu_memory(device.index(), allocated(device, /*at_peak=*/false) + bytes);
  }
}

MemoryCap::~MemoryCap() {
  if (bytes_ == 0) return;
  if (device_.is_cpu())
    CountingAllocator::limit(0);
  else
    limit_gpu_memory(device_.index(), 0);
}

}  // namespace bonfire
