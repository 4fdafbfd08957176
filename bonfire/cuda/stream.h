#pragma once

#include <functional>

#include <c10/core/Device.h>
#include <c10/cuda/CUDAStream.h>

namespace bonfire::cuda {

// A stream of one's own. Those of torch's pool are shared, so one that spins or waits would hold up somebody else's work.
class OwnStream {
 public:
  explicit OwnStream(c10::Device device);
  ~OwnStream();
  OwnStream(const OwnStream&) = delete;
  OwnStream& operator=(const OwnStream&) = delete;

  c10::cuda::CUDAStream get() const;

  // Stream: what comes after it waits for all that `other` was given so far.
  void wait_for(c10::cuda::CUDAStream other) const;
  // Stream: calls `function` from a thread of the driver when the stream gets there. It must not use CUDA, nor own anything
  // whose end does.
  void run_on_host(std::function<void()> function) const;

 private:
  c10::Device device_;
  cudaStream_t stream_ = nullptr;
};

}  // namespace bonfire::cuda
