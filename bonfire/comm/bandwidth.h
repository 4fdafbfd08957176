#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "bonfire/base/api.h"
#include "bonfire/base/collective.h"
#include "bonfire/comm/world.h"

namespace bonfire {

struct BandwidthOptions {
  CollectiveKind kind = CollectiveKind::all_reduce;
  at::ScalarType dtype = at::kFloat;
  std::int64_t least_bytes = 1 << 10;
  std::int64_t most_bytes = 1 << 24;
  int factor = 4;  // from one size to the next
  int repeats = 20;
  int warmups = 3;
  int transfers = 1;  // all_gather and reduce_scatter: as so many pairs, which are one collective
};

// One row of the table that nccl-tests prints.
struct BandwidthRow {
  std::int64_t bytes = 0;
  std::int64_t elements = 0;
  double seconds = 0;          // of one collective: the median over repeats, of the slowest rank
  double issue_seconds = 0;    // of the call that begins it, on the host: the median, of the slowest rank
  double algorithm_bytes = 0;  // a second: bytes / seconds
  double bus_bytes = 0;        // a second: what crosses each rank's link
  std::int64_t wrong = 0;      // elements with another value than they must have, over all ranks
};

// Collective: measures one kind of collective over a range of sizes, and checks its results. `report` is called with each
// row as it is done.
BONFIRE_API std::vector<BandwidthRow> measure_bandwidth(const World& world, const BandwidthOptions& options,
                                                        const std::function<void(const BandwidthRow&)>& report = {});

}  // namespace bonfire
