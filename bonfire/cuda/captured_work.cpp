#include "bonfire/cuda/captured_work.h"

#include <optional>
#include <string>

#include <ATen/core/CachingHostAllocator.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "bonfire/base/error.h"

namespace bonfire::cuda {
namespace {

// The words of an error of torch's, without the places in its code.
std::string first_line(const std::exception& error) {
  const auto* torchs = dynamic_cast<const c10::Error*>(&error);
  const std::string words = torchs ? torchs->what_without_backtrace() : error.what();
  return words.substr(0, words.find('\n'));
}

class CudaGraph final : public CapturedWork {
 public:
  explicit CudaGraph(c10::Device device) : device_(device) {}

  void capture(const std::function<void()>& work) override {
    const c10::cuda::CUDAGuard guard(device_);
    graph_.reset();
    c10::cuda::device_synchronize();
    // Otherwise what steps without a graph have used would lie beside what the graph will.
    c10::cuda::CUDACachingAllocator::emptyCache();
    graph_.emplace();
    const auto pool = at::cuda::graph_pool_handle();
    // Threads of NCCL's, of the loader and of autograd's go on with what they do.
    graph_->capture_begin(pool, cudaStreamCaptureModeThreadLocal);
    std::string problem;
    try {
      work();
    } catch (const std::exception& error) {
      problem = first_line(error);
    }
    try {
      graph_->capture_end();
    } catch (const std::exception& error) {
      if (problem.empty()) problem = first_line(error);
      leave(pool);
    }
    if (problem.empty()) return;
    graph_.reset();
    fail("{}", problem);
  }

  void replay() override {
    require(graph_.has_value(), "nothing was captured that could be replayed");
    graph_->replay();
  }

 private:
  // What torch does at the end of a capture that CUDA does not refuse.
  void leave(at::cuda::MempoolId_t pool) const {
    (void)cudaGetLastError();  // said already
    c10::cuda::CUDACachingAllocator::endAllocateToPool(device_.index(), pool);
    c10::cuda::CUDACachingAllocator::releasePool(device_.index(), pool);
    auto* const host = at::getHostAllocator(at::kCUDA);
    host->end_allocate_to_pool(pool);
    host->release_pool(pool);
  }

  c10::Device device_;
  std::optional<at::cuda::CUDAGraph> graph_;
};

}  // namespace

std::unique_ptr<CapturedWork> make_cuda_graph(c10::Device device) { return std::make_unique<CudaGraph>(device); }

}  // namespace bonfire::cuda
