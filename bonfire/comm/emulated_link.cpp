#include "bonfire/comm/emulated_link.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <thread>

namespace bonfire {
namespace {

class TurnState : public Work::State {
 public:
  TurnState(Work work, Nanoseconds start, Nanoseconds end) : work_(std::move(work)), start_(start), end_(end) {}

  void wait() override {
    work_.wait();
    // The delay is the thing emulated, not a way to wait for somebody.
    std::this_thread::sleep_until(std::chrono::steady_clock::time_point(std::chrono::nanoseconds(end_)));
  }

  bool wait_for(std::chrono::milliseconds time) override {
    const auto until = std::chrono::steady_clock::now() + time;
    if (!work_.wait_for(time)) return false;
    std::this_thread::sleep_until(std::min(until, std::chrono::steady_clock::time_point(std::chrono::nanoseconds(end_))));
    return now_ns() >= end_;
  }

  bool done() override { return work_.done() && now_ns() >= end_; }

  std::function<bool()> ending() override {
    return [ended = work_.state() ? work_.state()->ending() : nullptr, end = end_] {
      return (!ended || ended()) && now_ns() >= end;
    };
  }

  void on_done(std::function<void(Nanoseconds, Nanoseconds)> callback) override {
    if (!work_.state()) return callback(start_, end_);
    work_.state()->on_done([start = start_, end = end_, callback = std::move(callback)](Nanoseconds, Nanoseconds real_end) {
      callback(start, std::max(end, real_end));
    });
  }

 private:
  Work work_;
  Nanoseconds start_, end_;
};

}  // namespace

std::pair<Nanoseconds, Nanoseconds> EmulatedLink::take_turn(double seconds) {
  const std::lock_guard lock(mutex_);
  const Nanoseconds start = std::max(now_ns(), free_at_);
  free_at_ = start + std::llround(seconds * 1e9);
  return {start, free_at_};
}

std::shared_ptr<void> EmulatedLink::on_device(const std::function<std::shared_ptr<void>()>& make) {
  const std::lock_guard lock(mutex_);
  if (!on_device_) on_device_ = make();
  return on_device_;
}

Work end_with_turn(EmulatedLink& link, double seconds, Work work) {
  const auto [start, end] = link.take_turn(seconds);
  return Work(std::make_shared<TurnState>(std::move(work), start, end));
}

}  // namespace bonfire
