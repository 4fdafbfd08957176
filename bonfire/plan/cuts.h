#pragma once

#include <cstdint>
#include <vector>

#include "bonfire/base/api.h"
#include "bonfire/plan/profile.h"

namespace bonfire::plan {

// A place where a model can be cut in two: everything before it, and what crosses it.
struct Cut {
  double seconds = 0;  // forward and backward of all that lies before it
  std::int64_t crossing_bytes = 0;
  std::int64_t parameter_bytes = 0, state_bytes = 0, saved_bytes = 0;  // of all that lies before it
};

// All cuts of a model, each behind those that it can come after; the last one has everything before it. Of a chain they are
// one behind each Unit.
//
// Of a branching graph they are its antichain states, as PipeDream has them: sets of Units that have all their inputs among
// them. They grow from the first source: a Unit joins when one of its inputs is there, and brings the rest of what it needs
// along. So what does not depend on that source is computed where it is first needed.
class BONFIRE_API Cuts {
 public:
  // Throws ConfigError where there are too many, or the graph goes round in a circle.
  explicit Cuts(const Profile& profile);

  int count() const { return static_cast<int>(cuts_.size()); }
  const Cut& operator[](int cut) const { return cuts_[static_cast<std::size_t>(cut)]; }
  // Whether all that lies before `first` lies before `then` as well. REQUIRES: first < then.
  bool precedes(int first, int then) const;
  // The Units between two cuts, in an order in which they can run; first = -1: from the beginning.
  std::vector<int> between(int first, int then) const;

 private:
  using UnitSet = std::vector<std::uint64_t>;

  std::vector<Cut> cuts_;
  std::vector<int> order_;        // of all Units: one in which they can run
  std::vector<UnitSet> members_;  // of each cut, a bit for each Unit; empty for a chain
};

inline constexpr int most_cuts = 20'000;

}  // namespace bonfire::plan
