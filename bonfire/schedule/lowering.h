#pragma once

#include <vector>

#include "bonfire/base/api.h"
#include "bonfire/schedule/schedule.h"

namespace bonfire::schedule {

// Lowering adds to a table what an executor needs and its author left out. Each of these takes a table and returns one with
// more cells or with cells in better places. The order of computations is never
// changed. REQUIRES of all: the table is valid.

// Sends what another rank needs right after it was made, and receives it right before it is needed; where messages of one
// direction of a pair are needed in another order than they are made, earlier. For a table without messages.
BONFIRE_API Schedule add_messages(Schedule schedule);

// Moves every receive up by `ahead` computations, so that the message travels while the rank computes. Receives keep their
// order, so it costs buffers and nothing else: `ahead` more for each direction of a pair.
BONFIRE_API Schedule overlap_messages(Schedule schedule, int ahead = 1);

// For stages whose weights are sharded: gathers a stage before it computes and lets go of it after, with at most `resident`
// stages of a rank gathered at once. With 2 or more, the next one is gathered while the one before it computes.
BONFIRE_API Schedule add_sharding(Schedule schedule, int resident = 2);

enum class Reduce {
  once,  // after the last backward of the stage: gradients are kept whole until then
  each,  // after every backward: gradients are kept in shards
};
// Reduces the gradients of each stage over its data-parallel ranks, as early as they are complete.
BONFIRE_API Schedule add_reductions(Schedule schedule, Reduce when);

// Groups of stages whose tied weights keep one value: each sums its gradients with the others' right before its update.
BONFIRE_API Schedule add_ties(Schedule schedule, const std::vector<std::vector<int>>& groups);

// An update of each stage of each rank at the end of its row. For a table without updates.
BONFIRE_API Schedule add_updates(Schedule schedule);

// The forwards alone, for evaluation.
BONFIRE_API Schedule forwards_only(const Schedule& schedule);

struct LowerOptions {
  int receive_ahead = 1;
  bool sharded_parameters = false;
  int resident = 2;         // where parameters are sharded
  bool reductions = false;  // there are data-parallel ranks
  Reduce reduce = Reduce::once;
  std::vector<std::vector<int>> tied;
};
// All that an executor needs: whatever sort of cell the table lacks and the options ask for is added. What it has is kept as
// it is, so a person can write as much of it as he likes.
BONFIRE_API Schedule lower(Schedule schedule, const LowerOptions& options = {});

}  // namespace bonfire::schedule
