#pragma once

#include <condition_variable>
#include <mutex>

#include "bonfire/base/api.h"
#include "bonfire/base/clock.h"

namespace bonfire {

// Limits how much of a core a thread uses that works beside others: after some work it pauses, for as long as its share
// asks for. One thread at a time keeps the pace.
class BONFIRE_API Pace {
 public:
  explicit Pace(double share) : share_(share) {}  // of one core; 1: no pause

  void begin();  // before the thread that is to keep it starts
  void keep();   // by that thread, now and then; returns when it may go on
  void hurry();  // by any thread: no pause until the next begin(), and an end to one that has begun

 private:
  const double share_;
  std::mutex mutex_;
  std::condition_variable hurries_;
  bool hurried_ = false;
  Nanoseconds paused_at_ = 0;  // of the thread's processor time
};

}  // namespace bonfire
