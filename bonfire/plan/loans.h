#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <vector>

#include "bonfire/base/api.h"

namespace bonfire::plan {

// What a pool of buffers comes to hold when it is used in a given order: a loan takes the one that it had at the same place
// of an earlier pass, or else the smallest free one that is large enough, or else a new one. Nothing is given away.
class BONFIRE_API Loans {
 public:
  // Returns the number of the buffer. `place`: where in a pass this is; negative: nowhere in particular.
  std::size_t borrow(std::int64_t bytes, std::int64_t place = -1);
  void give_back(std::size_t buffer) { buffers_[buffer].free = true; }

  std::int64_t bytes() const { return bytes_; }
  std::size_t buffers() const { return buffers_.size(); }

 private:
  struct Buffer {
    std::int64_t bytes;
    bool free;
  };
  std::vector<Buffer> buffers_;
  std::map<std::pair<std::int64_t, std::int64_t>, std::size_t> places_;  // (place, bytes) to the buffer
  std::int64_t bytes_ = 0;
};

// What comes to be held to receive parts of other ranks in: the smallest free buffer that is large enough, or else a new one
// in the place of the largest free one.
class BONFIRE_API Arrivals {
 public:
  // Returns how large the buffer is that was taken, to be given back.
  std::int64_t take(std::int64_t bytes);
  void give_back(std::int64_t buffer) { free_.insert(buffer); }

  std::int64_t bytes() const { return bytes_; }

 private:
  std::multiset<std::int64_t> free_;
  std::int64_t bytes_ = 0;
};

// Sizes of buffers are multiples of this.
inline constexpr std::int64_t loan_granule = 512;

}  // namespace bonfire::plan
