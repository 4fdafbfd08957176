#pragma once

#include <cstdint>
#include <vector>

#include "bonfire/plan/layout.h"
#include "bonfire/plan/step_events.h"

namespace bonfire::plan {

// The most that a rank holds of a model while it is built. Parameters come into being in memory of their own, in their
// master's type; a flat buffer and its masters are made beside those that go into it, and its gradients when these have
// gone.

// All parameters first, then one flat buffer after the other.
std::int64_t bytes_of_whole_build(const std::vector<FlatLayout>& flats, const DataParallel& layout);
// Each Unit becomes a flat buffer before the next is made; the root's parameters wait for the end. `units` are those of
// step_units.
std::int64_t bytes_unit_by_unit(const std::vector<StepUnit>& units, const std::vector<FlatLayout>& flats,
                                const DataParallel& layout);

// The groups of a model as far as their order in backward is known before the first one: the root, whose parameters Units
// read, comes after all of them.
std::vector<ParameterGroup> groups_in_likely_order(const ModelDescription& model);
// The most that a rank holds of a model while its parameters move from buffers laid out as `from` into those laid out as
// `to`, with their gradients, when the first backward has ended. An old buffer goes when the last of its parameters has
// moved.
std::int64_t bytes_of_move(const std::vector<FlatLayout>& from, const std::vector<FlatLayout>& to,
                           const DataParallel& layout);

}  // namespace bonfire::plan
