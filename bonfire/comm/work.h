#pragma once

#include <memory>

#include "bonfire/base/api.h"

namespace bonfire {

// A collective that is under way: a small value handle. A default-made one is already done.
class BONFIRE_API Work {
 public:
  // What a backend, an emulated link or a recorder puts behind the handle.
  class State {
   public:
    virtual ~State() = default;
    virtual void wait() = 0;
    virtual bool done() = 0;
  };

  Work() = default;
  explicit Work(std::shared_ptr<State> state) : state_(std::move(state)) {}

  // Stream: on a CPU the calling thread waits until the result is there; on a GPU the current stream waits and the call
  // returns at once. Throws where the collective failed. May be called more than once.
  void wait() {
    if (state_) state_->wait();
  }
  bool done() const { return !state_ || state_->done(); }

 private:
  std::shared_ptr<State> state_;
};

}  // namespace bonfire
