#pragma once

#include <mutex>
#include <utility>

#include "bonfire/base/api.h"
#include "bonfire/base/clock.h"
#include "bonfire/base/collective.h"
#include "bonfire/comm/work.h"

namespace bonfire {

// One direction of a network card that does not exist: what goes over it queues, one after the other.
class BONFIRE_API EmulatedLink {
 public:
  explicit EmulatedLink(const Link& link) : link_(link) {}

  const Link& link() const { return link_; }
  // Takes the next turn, of the given length: when it begins and ends.
  std::pair<Nanoseconds, Nanoseconds> take_turn(double seconds);

 private:
  Link link_;
  std::mutex mutex_;
  Nanoseconds free_at_ = 0;
};

// Work on the host that ends when the collective itself has ended and its turn on the link is over.
BONFIRE_API Work end_with_turn(EmulatedLink& link, double seconds, Work work);

}  // namespace bonfire
