#pragma once

#include <cstddef>
#include <map>
#include <vector>

#include "bonfire/base/api.h"

namespace bonfire {

// The gathers of one pass (everything from one end of backward to the next, or one evaluation) in the order in which all
// ranks issue them.
struct Course {
  struct Entry {
    std::size_t unit = 0;
    int uses = 1;            // how many runs of the Unit, forward or backward, one gather serves
    int behind = 0;          // which version of its values: see FlatParameter::Source
    bool from_kept = false;  // comes after a stay in forward: what was kept between is gathered, if anything was
    bool operator==(const Entry&) const = default;
  };
  std::vector<Entry> entries;
  std::vector<std::size_t> ends;  // of each computation that ended within the pass: how many entries come before
};

// Writes down what a pass without a course did.
class BONFIRE_API CourseNotes {
 public:
  void gathered(std::size_t unit, int behind = 0);
  void used(std::size_t unit);
  // `forward`: backward has yet to come.
  void released(std::size_t unit, bool forward);
  // One computation of several in the pass has ended.
  void computation_ended() { notes_.push_back({What::computation_ended, 0, 0}); }

  // The course that does the same with fewer gathers: a Unit that is needed again before any other is gathered stays.
  Course course() const;

 private:
  enum class What { gathered, used, released, released_in_forward, computation_ended };
  struct Note {
    What what;
    std::size_t unit;
    int behind;  // of what is gathered, or was
  };
  std::vector<Note> notes_;
  std::map<std::size_t, int> behind_;  // of Units, when they were gathered last
};

}  // namespace bonfire
