#pragma once

#include "bonfire/base/clock.h"

namespace bonfire {

// How long the calling threads were inside an engine's own work: at seams, gates and gradients' arrivals. On a GPU that is
// what sharding costs the host, since nothing waits there; on a CPU it contains the waiting.
class HostClock {
 public:
  class Scope {
   public:
    explicit Scope(HostClock& clock) : clock_(clock), start_(clock.depth_++ == 0 ? now_ns() : 0) {}
    ~Scope() {
      if (--clock_.depth_ == 0) clock_.total_ += now_ns() - start_;
    }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    HostClock& clock_;
    Nanoseconds start_;
  };

  Nanoseconds total() const { return total_; }

 private:
  // Autograd's thread and the one that called backward take turns.
  Nanoseconds total_ = 0;
  int depth_ = 0;
};

}  // namespace bonfire
