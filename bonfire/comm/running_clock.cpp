#include "bonfire/comm/running_clock.h"

#include <algorithm>
#include <chrono>

namespace bonfire {
namespace {

using namespace std::chrono_literals;

constexpr auto kTick = 200ms;
// A busy machine lets a thread wait, too, but hardly for so long.
constexpr Nanoseconds kStopped = 1'500'000'000;

}  // namespace

RunningClock::RunningClock()
    : thread_([this] {
        std::unique_lock lock(mutex_);
        while (!wake_.wait_for(lock, kTick, [this] { return ending_; })) {
          const Nanoseconds now = now_ns();
          if (now - ticked_ > kStopped) stops_.emplace_back(ticked_, now);
          ticked_ = now;
        }
      }) {}

RunningClock::~RunningClock() {
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
  }
  wake_.notify_all();
  thread_.join();
}

Nanoseconds RunningClock::stopped_since(Nanoseconds then, Nanoseconds now) const {
  const std::lock_guard lock(mutex_);
  Nanoseconds sum = 0;
  for (const auto& [from, to] : stops_) sum += std::max<Nanoseconds>(0, to - std::max(from, then));
  // Whoever asks may have woken up before the thread.
  if (now - ticked_ > kStopped) sum += now - std::max(ticked_, then);
  return sum;
}

Nanoseconds RunningClock::now() const {
  const Nanoseconds now = now_ns();
  return now - stopped_since(0, now);
}

double RunningClock::running(double seconds) const {
  const Nanoseconds now = now_ns();
  const auto length = static_cast<Nanoseconds>(seconds * 1e9);
  return static_cast<double>(length - stopped_since(now - length, now)) * 1e-9;
}

}  // namespace bonfire
