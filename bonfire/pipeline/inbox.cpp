#include "bonfire/pipeline/inbox.h"

#include <algorithm>
#include <utility>

#include "bonfire/base/error.h"

namespace bonfire {

void Inbox::expect(Expected expected) {
  auto& queue = waiting_[expected.from];
  const bool announced = expected.values && expected.stage.awaits_announcement(expected.form);
  queue.push_back({.expected = std::move(expected)});
  if (announced) queue.back().announcement = links_.room_for_announcement();
  progress();
}

void Inbox::put(const Slot& slot, bool values, Tensors tensors) { parcels_[{slot, values}] = {std::move(tensors)}; }

void Inbox::post(const Expected& expected, const Crossing& crossing) {
  Parcel parcel{links_.room(crossing, expected.samples, expected.place)};
  parcel.arrival = links_.receive(parcel.tensors, expected.from);
  parcels_[{{expected.stage.place().number, expected.microbatch}, expected.values}] = std::move(parcel);
}

// Whether the first of the queue was posted; it is then no more in it.
bool Inbox::post_front(std::deque<Waiting>& queue, bool wait) {
  auto& [expected, announcement, announced] = queue.front();
  auto& stage = expected.stage;
  if (!expected.values) {
    if (!stage.knows_outgoing(expected.form)) return false;
    post(expected, stage.returning(expected.form));
  } else {
    if (announcement.defined()) {
      if (!announced) announced = links_.receive({announcement}, expected.from);
      if (!wait && !announced->done()) return false;
      announced->wait();
      stage.set_incoming(expected.form, Links::read(announcement));
    }
    post(expected, stage.incoming(expected.form));
  }
  queue.pop_front();
  return true;
}

void Inbox::progress() {
  for (auto at = waiting_.begin(); at != waiting_.end();) {
    while (!at->second.empty() && post_front(at->second, /*wait=*/false)) {
    }
    at = at->second.empty() ? waiting_.erase(at) : std::next(at);
  }
}

void Inbox::await(const Slot& slot, bool values) {
  const auto is_it = [&](const Waiting& waiting) {
    return waiting.expected.stage.place().number == slot.first && waiting.expected.microbatch == slot.second &&
           waiting.expected.values == values;
  };
  for (auto& [from, queue] : waiting_)
    while (std::any_of(queue.begin(), queue.end(), is_it))
      require(post_front(queue, /*wait=*/true),
              "stage {}, microbatch {}: what it reads comes after gradients of a forward that has yet to run", slot.first,
              slot.second);
  if (const auto parcel = parcels_.find({slot, values}); parcel != parcels_.end()) parcel->second.arrival.wait();
}

Tensors Inbox::take(const Slot& slot, bool values) {
  await(slot, values);
  auto node = parcels_.extract({slot, values});
  require(!node.empty(), "stage {}, microbatch {}: what it reads has not been received", slot.first, slot.second);
  return std::move(node.mapped().tensors);
}

void Inbox::clear() {
  parcels_.clear();
  waiting_.clear();
}

}  // namespace bonfire
