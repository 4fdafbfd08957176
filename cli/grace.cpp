#include "cli/grace.h"

#include <utility>

#include "bonfire/comm/signal_events.h"

namespace bonfire::cli {

using Clock = std::chrono::steady_clock;

Grace::Grace(std::chrono::duration<double> length, std::function<void()> late) : length_(length), late_(std::move(late)) {
  const SignalsBlocked signals;  // in the new thread
  thread_ = std::jthread([this](std::stop_token stop) { watch(std::move(stop)); });
}

Grace::~Grace() = default;

void Grace::begin() {
  const std::lock_guard lock(mutex_);
  if (!until_) until_ = Clock::now() + std::chrono::duration_cast<Clock::duration>(length_);
  changed_.notify_all();
}

void Grace::cancel() {
  const std::lock_guard lock(mutex_);
  until_.reset();
  changed_.notify_all();
}

void Grace::watch(std::stop_token stop) {
  std::unique_lock lock(mutex_);
  while (changed_.wait(lock, stop, [&] { return until_.has_value(); })) {
    const auto until = *until_;
    if (changed_.wait_until(lock, stop, until, [&] { return until_ != until; })) continue;
    if (stop.stop_requested()) return;
    until_.reset();
    lock.unlock();
    return late_();
  }
}

}  // namespace bonfire::cli
