#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <utility>

#include "bonfire/base/api.h"
#include "bonfire/base/clock.h"
#include "bonfire/base/error.h"

namespace bonfire {

// A collective failed because another rank is gone or cannot be reached: where a failure shows, not where it began.
class BONFIRE_API PeerLost : public Error {
 public:
  using Error::Error;
};

// A collective that is under way: a small value handle. A default-made one is already done.
class BONFIRE_API Work {
 public:
  // What a backend, an emulated link or a recorder puts behind the handle.
  class State {
   public:
    virtual ~State() = default;
    virtual void wait() = 0;
    // Waits no longer than `time`; whether it has ended by then. Where waiting is a stream's business, or what is waited for
    // begins only then, it is wait().
    virtual bool wait_for(std::chrono::milliseconds /*time*/) {
      wait();
      return true;
    }
    virtual bool done() = 0;
    // Whether the collective has ended, as a question that any thread may ask at any time. It keeps no tensor alive, and
    // costs the collective nothing. A state that cannot tell when it ends may say so only when it is waited for.
    virtual std::function<bool()> ending() = 0;
    // Calls `callback` once, from any thread, with the times between which the collective really ran, or when it is waited
    // for, as above. On a GPU this costs calls of the host, so it is for the recorder alone.
    // REQUIRES: called by the thread that issued the collective, before anything else.
    virtual void on_done(std::function<void(Nanoseconds start, Nanoseconds end)> callback) = 0;
  };

  Work() = default;
  explicit Work(std::shared_ptr<State> state) : state_(std::move(state)) {}

  // Stream: on a CPU the calling thread waits until the result is there; on a GPU the current stream waits and the call
  // returns at once. Throws where the collective failed: PeerLost where that is why. May be called more than once.
  void wait() {
    if (state_) state_->wait();
  }
  // The same, but on a CPU no longer than `time`. Whether the result is there.
  bool wait_for(std::chrono::milliseconds time) { return !state_ || state_->wait_for(time); }
  bool done() const { return !state_ || state_->done(); }

  const std::shared_ptr<State>& state() const { return state_; }

 private:
  std::shared_ptr<State> state_;
};

}  // namespace bonfire
