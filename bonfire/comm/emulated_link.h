#pragma once

#include <functional>
#include <memory>
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
  // What plays the link's part on a device (a stream of its own), made at the first question. All groups behind the link
  // get the same.
  std::shared_ptr<void> on_device(const std::function<std::shared_ptr<void>()>& make);

 private:
  Link link_;
  std::mutex mutex_;
  Nanoseconds free_at_ = 0;
  std::shared_ptr<void> on_device_;
};

// Work on the host that ends when the collective itself has ended and its turn on the link is over.
BONFIRE_API Work end_with_turn(EmulatedLink& link, double seconds, Work work);

}  // namespace bonfire
