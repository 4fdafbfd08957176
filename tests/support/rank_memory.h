#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <utility>

#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

namespace bonfire::testing {

// What the calling thread, which is a rank, holds of the host's memory for tensors that it has made since. Blocks that a
// thread of the backend is the last to hold count as held for good: the numbers err to the high side only. Blocks below a
// cache line are left out: single numbers on their way between ranks, whose end such a thread decides.
class RankMemory {
 public:
  RankMemory() : guard_(c10::DebugInfoKind::PROFILER_STATE, account_) {}

  std::int64_t current() const { return account_->now; }
  // Since it was made, or since the last call.
  std::int64_t peak() { return std::exchange(account_->peak, account_->now); }
  // Everything that was made since the last call, freed or not.
  std::int64_t allocated() { return std::exchange(account_->allocated, 0); }

 private:
  struct Account : c10::MemoryReportingInfoBase {
    void reportMemoryUsage(void* block, std::int64_t size, std::size_t, std::size_t, c10::Device device) override {
      if (!device.is_cpu()) return;
      if (size >= 64) {
        blocks[block] = size;
        now += size;
        allocated += size;
        peak = std::max(peak, now);
      } else if (const auto known = blocks.find(block); size < 0 && known != blocks.end()) {
        now -= known->second;
        blocks.erase(known);
      }
    }
    bool memoryProfilingEnabled() const override { return true; }

    std::unordered_map<void*, std::int64_t> blocks;
    std::int64_t now = 0, peak = 0, allocated = 0;
  };

  std::shared_ptr<Account> account_ = std::make_shared<Account>();
  c10::DebugInfoGuard guard_;
};

}  // namespace bonfire::testing
