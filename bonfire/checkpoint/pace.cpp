#include "bonfire/checkpoint/pace.h"

#include <chrono>
#include <ctime>

namespace bonfire {
namespace {

// Work in this little time needs no pause yet: to pause takes some microseconds itself.
constexpr Nanoseconds least_work = 200'000;

Nanoseconds processor_time() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return Nanoseconds{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

}  // namespace

void Pace::begin() {
  const std::lock_guard lock(mutex_);
  hurried_ = false;
  paused_at_ = 0;  // as that of a thread which starts
}

void Pace::keep() {
  if (share_ >= 1) return;
  std::unique_lock lock(mutex_);
  const Nanoseconds now = processor_time(), worked = now - paused_at_;
  if (worked < least_work) return;
  paused_at_ = now;
  const std::chrono::duration<double, std::nano> pause(static_cast<double>(worked) * (1 / share_ - 1));
  hurries_.wait_for(lock, pause, [this] { return hurried_; });
}

void Pace::hurry() {
  const std::lock_guard lock(mutex_);
  hurried_ = true;
  hurries_.notify_all();
}

}  // namespace bonfire
