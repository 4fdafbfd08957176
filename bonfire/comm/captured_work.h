#pragma once

#include <functional>
#include <memory>

#include <c10/core/Device.h>

#include "bonfire/base/api.h"

namespace bonfire {

// Work of a device that was issued once by the host and is then done again and again by one call: a CUDA graph. It does what
// was issued to the bit, with the memory and the numbers that were given then; what is to be different each time must lie in
// memory of the device.
class BONFIRE_API CapturedWork {
 public:
  virtual ~CapturedWork() = default;

  // Calls `work`, whose work on the current stream, and on others that wait for it and that it waits for, is noted and not
  // done. Memory that it takes and gives back meanwhile stays this object's. Waits for the device first, and gives torch's
  // unused memory back to it. Throws where `work` does, or where it asks the device something, as one line; there is nothing
  // to replay then. REQUIRES: the current stream is not the device's default one.
  virtual void capture(const std::function<void()>& work) = 0;
  // Stream: the current one does it all, once.
  virtual void replay() = 0;
};

// Throws Error where this device has none of it.
BONFIRE_API std::unique_ptr<CapturedWork> make_captured_work(c10::Device device);

}  // namespace bonfire
