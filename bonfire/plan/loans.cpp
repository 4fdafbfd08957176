#include "bonfire/plan/loans.h"

#include <iterator>

#include "bonfire/base/size.h"

namespace bonfire::plan {

std::size_t Loans::borrow(std::int64_t bytes, std::int64_t place) {
  std::size_t choice = buffers_.size();
  if (const auto before = places_.find({place, bytes});
      place >= 0 && before != places_.end() && buffers_[before->second].free) {
    choice = before->second;
  } else {
    for (std::size_t at = 0; at < buffers_.size(); ++at) {
      if (!buffers_[at].free || buffers_[at].bytes < bytes) continue;
      if (choice == buffers_.size() || buffers_[at].bytes < buffers_[choice].bytes) choice = at;
    }
  }
  if (choice == buffers_.size()) {
    buffers_.push_back({round_up(bytes, loan_granule), true});
    bytes_ += buffers_.back().bytes;
  }
  buffers_[choice].free = false;
  if (place >= 0) places_[{place, bytes}] = choice;
  return choice;
}

std::int64_t Arrivals::take(std::int64_t bytes) {
  auto buffer = free_.lower_bound(bytes);
  if (buffer == free_.end()) {
    bytes_ += bytes;
    if (free_.empty()) return bytes;
    bytes_ -= *free_.rbegin();
    free_.erase(std::prev(free_.end()));
    return bytes;
  }
  const std::int64_t taken = *buffer;
  free_.erase(buffer);
  return taken;
}

}  // namespace bonfire::plan
