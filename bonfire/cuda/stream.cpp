#include "bonfire/cuda/stream.h"

#include <memory>
#include <utility>

#include <ATen/cuda/CUDAEvent.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>

namespace bonfire::cuda {
namespace {

void call_and_delete(void* data) { (*std::unique_ptr<std::function<void()>>(static_cast<std::function<void()>*>(data)))(); }

}  // namespace

OwnStream::OwnStream(c10::Device device) : device_(device) {
  const c10::cuda::CUDAGuard guard(device_);
  C10_CUDA_CHECK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
}

// At the end of the process the driver may be gone already; then there is nothing left to free.
OwnStream::~OwnStream() { C10_CUDA_CHECK_WARN(cudaStreamDestroy(stream_)); }

c10::cuda::CUDAStream OwnStream::get() const { return c10::cuda::getStreamFromExternal(stream_, device_.index()); }

void OwnStream::wait_for(c10::cuda::CUDAStream other) const {
  at::cuda::CUDAEvent event;
  event.record(other);
  event.block(get());
}

void OwnStream::run_on_host(std::function<void()> function) const {
  auto data = std::make_unique<std::function<void()>>(std::move(function));
  C10_CUDA_CHECK(cudaLaunchHostFunc(stream_, call_and_delete, data.get()));
  data.release();
}

}  // namespace bonfire::cuda
