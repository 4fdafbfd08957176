#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "bonfire/base/api.h"
#include "bonfire/base/clock.h"
#include "bonfire/comm/progress.h"

namespace c10d {
class Store;
}

namespace bonfire {

// Signs of life: what ranks publish of their progress through a store, and what a watcher knows of all of them. A rank's
// sign has the same length however many ranks there are; a watcher reads all of them with one request.
class BONFIRE_API Beats {
 public:
  // `now` is the time from which nothing was heard of anybody, by any clock. REQUIRES: the store outlives this.
  Beats(c10d::Store& store, int rank, int size, Nanoseconds now);

  void publish(const Progress& progress);

  struct Seen {
    Progress progress = {};
    Nanoseconds at = 0;  // when the last new sign was seen
    std::string numbers = {};
    std::vector<Progress::Lane> lanes = {};  // all groups it has told of
  };
  // Everybody, by rank, as of `now`.
  const std::vector<Seen>& look(Nanoseconds now);
  const std::vector<Seen>& seen() const { return seen_; }

 private:
  void read(const std::vector<int>& ranks, Nanoseconds now);
  void read_lanes(const std::vector<int>& ranks);

  c10d::Store& store_;
  int rank_;
  std::int64_t beat_ = 0;
  std::size_t lanes_told_ = 0;
  std::vector<int> everybody_;
  std::vector<Seen> seen_;
  std::vector<int> missing_;  // have not said anything yet
};

}  // namespace bonfire
