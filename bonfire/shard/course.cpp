#include "bonfire/shard/course.h"

#include <algorithm>

namespace bonfire {

void CourseNotes::gathered(std::size_t unit, int behind) {
  behind_[unit] = behind;
  notes_.push_back({What::gathered, unit, behind});
}
void CourseNotes::used(std::size_t unit) { notes_.push_back({What::used, unit, behind_[unit]}); }
void CourseNotes::released(std::size_t unit, bool forward) {
  notes_.push_back({forward ? What::released_in_forward : What::released, unit, behind_[unit]});
}

Course CourseNotes::course() const {
  const auto released = [](What what) { return what == What::released || what == What::released_in_forward; };
  // A release and the next gather of the same values of a Unit cancel each other where no other gather lies between that
  // remains.
  std::vector<Note> kept;
  for (const auto& note : notes_) {
    if (note.what == What::gathered) {
      auto before = std::find_if(kept.rbegin(), kept.rend(), [&](const Note& other) {
        return other.what == What::gathered || (released(other.what) && other.unit == note.unit);
      });
      if (before != kept.rend() && released(before->what) && before->behind == note.behind) {
        kept.erase(std::next(before).base());
        continue;
      }
    }
    kept.push_back(note);
  }
  Course course;
  std::vector<std::ptrdiff_t> open;  // by Unit: its entry, or -1
  std::vector<char> in_forward;      // by Unit: whether it was released last in forward
  for (const auto& note : kept) {
    if (note.unit >= open.size()) open.resize(note.unit + 1, -1), in_forward.resize(note.unit + 1, false);
    switch (note.what) {
      case What::gathered:
        open[note.unit] = static_cast<std::ptrdiff_t>(course.entries.size());
        course.entries.push_back(
            {.unit = note.unit, .uses = 0, .behind = note.behind, .from_kept = in_forward[note.unit] != 0});
        break;
      case What::used:
        if (open[note.unit] >= 0) ++course.entries[static_cast<std::size_t>(open[note.unit])].uses;
        break;
      case What::released:
      case What::released_in_forward:
        open[note.unit] = -1;
        in_forward[note.unit] = note.what == What::released_in_forward;
        break;
      case What::computation_ended: course.ends.push_back(course.entries.size()); break;
    }
  }
  return course;
}

}  // namespace bonfire
