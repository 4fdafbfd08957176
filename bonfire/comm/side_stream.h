#pragma once

#include <optional>

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace bonfire {

inline c10::Stream current_stream(at::Device device) { return c10::impl::VirtualGuardImpl(device.type()).getStream(device); }

// A second stream of a device for work beside the one that computes. On a CPU there is none, and everything runs at once.
class SideStream {
 public:
  explicit SideStream(at::Device device) : device_(device) {
    if (!device.is_cpu()) stream_ = c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device, true);
  }

  // Stream: what `work` issues begins when the current stream has got here.
  template <class Function>
  void run(const Function& work) {
    if (!stream_) return work();
    wait(*stream_, current());
    const c10::StreamGuard guard(*stream_);
    work();
  }

  // From another thread. Stream: what `work` issues begins after what was run before.
  template <class Function>
  void run_apart(const Function& work) {
    if (!stream_) return work();
    const c10::StreamGuard guard(*stream_);
    work();
  }

  // The end of everything that was run; nothing on a CPU, where it has ended.
  std::optional<c10::Event> end() const {
    if (!stream_) return std::nullopt;
    std::optional<c10::Event> event(std::in_place, stream_->device_type());
    event->record(*stream_);
    return event;
  }

  // Stream: the current one goes on when everything that was run has ended.
  void join() {
    if (stream_) wait(current(), *stream_);
  }

 private:
  c10::Stream current() const { return current_stream(device_); }
  static void wait(const c10::Stream& waiting, const c10::Stream& waited_for) {
    c10::Event event(waited_for.device_type());
    event.record(waited_for);
    event.block(waiting);
  }

  at::Device device_;
  std::optional<c10::Stream> stream_;
};

}  // namespace bonfire
