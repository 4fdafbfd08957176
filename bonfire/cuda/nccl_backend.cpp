#include "bonfire/cuda/nccl_backend.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <exception>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include <ATen/Context.h>
#include <ATen/cuda/CUDAEvent.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include "bonfire/base/clock.h"
#include "bonfire/base/error.h"
#include "bonfire/comm/c10d_backend.h"
#include "bonfire/comm/emulated_link.h"
#include "bonfire/cuda/shared_gpu.h"
#include "bonfire/cuda/spin.h"
#include "bonfire/cuda/stream.h"

namespace bonfire::cuda {
namespace {

using Callback = std::function<void(Nanoseconds start, Nanoseconds end)>;

// Tells by the host's clock when collectives of one communicator ran on the GPU: two streams that compute nothing arrive
// where a collective may begin and where it has ended, and call the host there.
class Stopwatch {
 public:
  explicit Stopwatch(c10::Device device) : device_(device), ready_(device), ended_(device) {}

  // Calls back when `work`, which was issued just now, has ended. It began when the current stream got to this point and the
  // one before it had ended.
  void time(c10d::Work& work, Callback callback) const {
    const auto ready = std::make_shared<std::atomic<Nanoseconds>>(0);
    ready_.wait_for(c10::cuda::getCurrentCUDAStream(device_.index()));
    ready_.run_on_host([ready] { *ready = now_ns(); });
    {
      const c10::cuda::CUDAStreamGuard guard(ended_.get());
      work.synchronize();
    }
    ended_.run_on_host([ready, last = last_end_, callback = std::move(callback)] {
      const Nanoseconds end = now_ns();
      const Nanoseconds begin = *ready;
      const Nanoseconds start = std::max(begin == 0 ? end : begin, last->load());
      *last = end;
      callback(start, end);
    });
  }

 private:
  c10::Device device_;
  OwnStream ready_, ended_;
  // The host's side owns nothing of CUDA's.
  std::shared_ptr<std::atomic<Nanoseconds>> last_end_ = std::make_shared<std::atomic<Nanoseconds>>(0);
};

// The stopwatch of a communicator, made when the first collective is timed: streams are not for nothing.
class Timing {
 public:
  explicit Timing(c10::Device device) : device_(device) {}

  const Stopwatch& stopwatch() {
    const std::lock_guard lock(mutex_);
    if (!stopwatch_) stopwatch_.emplace(device_);
    return *stopwatch_;
  }
  c10::Device device() const { return device_; }

 private:
  c10::Device device_;
  std::mutex mutex_;
  std::optional<Stopwatch> stopwatch_;
};

// The event that c10d records behind a collective. To ask whether that has ended it is enough, and unlike c10d's work it
// keeps no tensor alive; c10d hands it out to classes derived from the work only.
struct EndOfWork : c10d::ProcessGroupNCCL::WorkNCCL {
  static std::shared_ptr<at::cuda::CUDAEvent> of(c10d::Work& work) {
    return static_cast<c10d::ProcessGroupNCCL::WorkNCCL&>(work).*(&EndOfWork::ncclEndEvent_);
  }
};

bool has_passed(at::cuda::CUDAEvent& event, c10::Device device) {
  // The thread that asks may never have used a GPU, and another thread may be capturing a graph.
  const c10::cuda::CUDAGuard guard(device);
  const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeThreadLocal);
  return event.query();
}

// A collective that is being captured into a graph does not run, so there is nothing to wait for.
bool being_captured() { return c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None; }

class NcclState : public Work::State {
 public:
  NcclState(c10::intrusive_ptr<c10d::Work> work, std::vector<at::Tensor> tensors, std::shared_ptr<Timing> timing)
      : work_(std::move(work)), tensors_(std::move(tensors)), timing_(std::move(timing)) {}

  // The tensors' memory returns to this thread's stream, which must not reuse it while NCCL still works on it.
  ~NcclState() override {
    if (waited_ || never_runs()) return;
    try {
      work_->synchronize();
    } catch (const std::exception& error) {
      TORCH_WARN("a collective that nobody waited for failed: ", error.what());
    }
  }
  NcclState(const NcclState&) = delete;
  NcclState& operator=(const NcclState&) = delete;

  void wait() override {
    if (!never_runs()) work_->wait();
    waited_ = true;
  }
  bool done() override { return work_->isCompleted(); }
  std::function<bool()> ending() override {
    if (being_captured()) return [] { return true; };
    return [event = EndOfWork::of(*work_), device = timing_->device()] { return has_passed(*event, device); };
  }
  void on_done(Callback callback) override { timing_->stopwatch().time(*work_, std::move(callback)); }

 private:
  // It is part of a capture that is over, and has nothing to do with what this stream does now.
  bool never_runs() const { return captured_ && !being_captured(); }

  c10::intrusive_ptr<c10d::Work> work_;
  std::vector<at::Tensor> tensors_;
  std::shared_ptr<Timing> timing_;
  bool captured_ = being_captured();
  bool waited_ = false;
};

// A collective and its turn on an emulated link, which is a stream that spins.
class LinkedState : public Work::State {
 public:
  LinkedState(Work work, std::shared_ptr<const OwnStream> link, Nanoseconds turn)
      : work_(std::move(work)), link_(std::move(link)) {
    const auto current = c10::cuda::getCurrentCUDAStream(link_->get().device_index());
    link_->wait_for(current);
    link_->run_on_host([times = times_] { times->start = now_ns(); });
    launch_spin(turn, link_->get().stream());
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    over_->record(link_->get());
  }

  void wait() override {
    work_.wait();
    over_->block(c10::cuda::getCurrentCUDAStream(link_->get().device_index()));
  }
  bool done() override { return work_.done() && over_->query(); }
  std::function<bool()> ending() override {
    return [ended = work_.state()->ending(), over = over_, device = link_->get().device()] {
      return ended() && has_passed(*over, device);
    };
  }

  // The later of the two ends is the end.
  void on_done(Callback callback) override {
    link_->run_on_host([times = times_, callback] { times->one_ended(now_ns(), callback); });
    work_.state()->on_done([times = times_, callback](Nanoseconds, Nanoseconds end) { times->one_ended(end, callback); });
  }

 private:
  struct Times {
    std::atomic<Nanoseconds> start = 0;
    std::mutex mutex;
    Nanoseconds first_end = 0;

    void one_ended(Nanoseconds end, const Callback& callback) {
      {
        const std::lock_guard lock(mutex);
        if (first_end == 0) {
          first_end = end;
          return;
        }
      }
      callback(start, std::max(first_end, end));
    }
  };

  Work work_;
  std::shared_ptr<const OwnStream> link_;
  std::shared_ptr<at::cuda::CUDAEvent> over_ = std::make_shared<at::cuda::CUDAEvent>();
  std::shared_ptr<Times> times_ = std::make_shared<Times>();
};

class NcclBackend final : public C10dBackend {
 public:
  NcclBackend(c10::intrusive_ptr<c10d::ProcessGroupNCCL> nccl, const NcclOptions& options)
      : C10dBackend(nccl),
        nccl_(std::move(nccl)),
        device_(options.device),
        name_(options.name),
        timing_(std::make_shared<Timing>(options.device)),
        patience_(std::min<std::chrono::milliseconds>(options.timeout, std::chrono::seconds(30))) {}

  // The last handle is gone: NCCL's own threads must not outlive what they watch.
  ~NcclBackend() override {
    try {
      if (std::uncaught_exceptions() == exceptions_) let_work_end();
      shutdown();
    } catch (const std::exception& error) {
      TORCH_WARN("the communicator of '", name_, "' did not end in good order: ", error.what());
    }
  }
  NcclBackend(const NcclBackend&) = delete;
  NcclBackend& operator=(const NcclBackend&) = delete;

  // NCCL works in place where the part is this rank's own slice of the whole.
  Work all_gather(std::span<const Transfer> transfers) override {
    return as_one(transfers, [&](at::Tensor whole, at::Tensor part) { return nccl_->_allgather_base(whole, part, {}); });
  }

  Work reduce_scatter(std::span<const Transfer> transfers, Reduce op) override {
    c10d::ReduceScatterOptions options;
    options.reduceOp = to_c10d(op);
    return as_one(transfers,
                  [&](at::Tensor whole, at::Tensor part) { return nccl_->_reduce_scatter_base(part, whole, options); });
  }

  Work batch(std::span<const Message> messages) override {
    std::vector<at::Tensor> tensors;
    nccl_->startCoalescing();
    for (const auto& message : messages) {
      std::vector<at::Tensor> one{message.tensor};
      if (message.way == Message::Way::send)
        nccl_->send(one, message.peer, 0);
      else
        nccl_->recv(one, message.peer, 0);
      tensors.push_back(message.tensor);
    }
    return track(nccl_->endCoalescing(), std::move(tensors));
  }

  // Told its device, or c10d guesses one from the rank's number.
  Work barrier() override {
    c10d::BarrierOptions options;
    options.device = device_;
    return track(nccl_->barrier(options), {});
  }

  Work over(EmulatedLink& link, double seconds, Work work) override {
    auto stream = link.on_device([this] { return std::make_shared<OwnStream>(device_); });
    return Work(std::make_shared<LinkedState>(std::move(work), std::static_pointer_cast<const OwnStream>(std::move(stream)),
                                              std::llround(seconds * 1e9)));
  }

  bool ordered() const override { return true; }
  std::string stream() const override { return "nccl " + name_; }

 protected:
  Work track(c10::intrusive_ptr<c10d::Work> work, std::vector<at::Tensor> tensors) override {
    require(work != nullptr, "NCCL over '{}' began nothing", name_);
    if (!being_captured()) last_end_ = EndOfWork::of(*work);
    return Work(std::make_shared<NcclState>(std::move(work), std::move(tensors), timing_));
  }

 private:
  // A shutdown aborts what is under way, and a slower rank would never receive what this one has sent last. Work that nobody
  // else takes part in any more, as after an error elsewhere, does not end: the time is limited.
  void let_work_end() const {
    const auto most = std::chrono::steady_clock::now() + patience_;
    while (last_end_ && !has_passed(*last_end_, device_) && std::chrono::steady_clock::now() < most)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }

  // One launch, however many they are.
  template <class Begin>
  Work as_one(std::span<const Transfer> transfers, const Begin& begin) {
    std::vector<at::Tensor> tensors;
    for (const auto& transfer : transfers) tensors.insert(tensors.end(), {transfer.whole, transfer.part});
    if (transfers.size() == 1) return track(begin(transfers[0].whole, transfers[0].part), std::move(tensors));
    nccl_->startCoalescing();
    for (const auto& transfer : transfers) begin(transfer.whole, transfer.part);
    return track(nccl_->endCoalescing(), std::move(tensors));
  }

  c10::intrusive_ptr<c10d::ProcessGroupNCCL> nccl_;
  c10::Device device_;
  std::string name_;
  std::shared_ptr<Timing> timing_;
  std::chrono::milliseconds patience_;
  std::shared_ptr<at::cuda::CUDAEvent> last_end_{};  // of what was issued last
  int exceptions_ = std::uncaught_exceptions();
};

}  // namespace

std::shared_ptr<Backend> make_nccl_backend(c10::intrusive_ptr<c10d::Store> store, int rank, int size,
                                           const NcclOptions& options) {
  switch_flight_recorder_off();
  at::globalContext().lazyInitDevice(c10::DeviceType::CUDA);
  const c10::cuda::CUDAGuard guard(options.device);
  if (options.first)
    if (const int most = let_ranks_share_gpus(*store, rank, size, options.device); most > 1 && rank == 0)
      options.log.warning(
          "{} ranks share a GPU: right for trying things out, slow for training; start one rank for each GPU", most);
  auto nccl_options = c10d::ProcessGroupNCCL::Options::create(options.high_priority);
  nccl_options->timeout = options.timeout;
  auto nccl = c10::make_intrusive<c10d::ProcessGroupNCCL>(std::move(store), rank, size, std::move(nccl_options));
  nccl->setGroupDesc(options.name);
  nccl->setBoundDeviceId(options.device);
  nccl->eagerConnectSingleDevice(options.device);
  return std::make_shared<NcclBackend>(std::move(nccl), options);
}

}  // namespace bonfire::cuda
