#pragma once

#include <cstdint>

#include <c10/core/Device.h>

#include "bonfire/base/api.h"
#include "bonfire/base/error.h"

namespace bonfire {

// Measures what this process has allocated for tensors on one device since the meter was made, from whatever thread.
//
// Torch has one CPU allocator a process and no counter in it. The first meter of a process puts one that counts in its
// place, for good: blocks made by one allocator must not be given back to another. So make it before the first tensor.
class BONFIRE_API MemoryMeter {
 public:
  explicit MemoryMeter(c10::Device device);

  // Bytes more than when the meter was made.
  std::int64_t current() const;
  // The largest that current() has been since then, or since the last meter of the same device was made.
  std::int64_t peak() const;

 private:
  c10::Device device_;
  std::int64_t before_ = 0;
};

// An allocation that a MemoryCap has refused.
class BONFIRE_API MemoryRefused : public Error {
 public:
  using Error::Error;
};

// For its lifetime this process may allocate no more than `bytes` for tensors on a device, beyond what it holds already:
// more is refused, on a CPU with MemoryRefused, on a GPU with torch's own OutOfMemoryError. 0: no limit. One at a time a
// device.
class BONFIRE_API MemoryCap {
 public:
  MemoryCap(c10::Device device, std::int64_t bytes);
  ~MemoryCap();
  MemoryCap(const MemoryCap&) = delete;
  MemoryCap& operator=(const MemoryCap&) = delete;

 private:
  c10::Device device_;
  std::int64_t bytes_;
};

}  // namespace bonfire
