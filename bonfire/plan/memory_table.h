#pragma once

#include <cstdint>
#include <vector>

#include "bonfire/base/api.h"
#include "bonfire/plan/memory.h"

namespace bonfire::plan {

// One way to shard a model over the ranks, and what a rank needs then.
struct MemoryRow {
  const PrecisionKind* kind = nullptr;
  int shard = 1;
  Sharded what = Sharded::none;
  BytesPerParameter per_parameter{};
  double reduction = 1;   // how many times less model state than without sharding
  ModelState state{};     // exact, with padding
  std::int64_t peak = 0;  // of everything, with the given microbatch
  bool given = false;     // the precision, factor and choice of what is sharded that were given
};

// All of them for `ranks` data-parallel ranks: every precision, every factor that is a power of two or all ranks, and
// everything that can be sharded. Settings that are not varied are the layout's.
BONFIRE_API std::vector<MemoryRow> memory_table(const ModelDescription& model, const DataParallel& layout,
                                                const MemoryOptions& options, int ranks);

}  // namespace bonfire::plan
