#pragma once

#include <cstdint>
#include <vector>

#include "bonfire/plan/course.h"
#include "bonfire/plan/layout.h"

namespace bonfire::plan {

// The most that a rank holds of a model while it is built. Parameters come into being in memory of their own, in their
// master's type; a flat buffer and its masters are made beside those that go into it, and its gradients when these have
// gone.

// All parameters first, then one flat buffer after the other.
std::int64_t bytes_of_whole_build(const std::vector<FlatLayout>& flats, const DataParallel& layout);
// Each Unit becomes a flat buffer before the next is made; the root's parameters wait for the end. `units` are those of
// course_units.
std::int64_t bytes_unit_by_unit(const std::vector<CourseUnit>& units, const std::vector<FlatLayout>& flats,
                                const DataParallel& layout);

}  // namespace bonfire::plan
