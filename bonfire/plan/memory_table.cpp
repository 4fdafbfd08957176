#include "bonfire/plan/memory_table.h"

#include "bonfire/base/error.h"

namespace bonfire::plan {
namespace {

std::vector<int> factors_to_try(int ranks) {
  std::vector<int> factors;
  for (int shard = 1; shard <= ranks; shard *= 2)
    if (ranks % shard == 0) factors.push_back(shard);
  if (factors.back() != ranks) factors.push_back(ranks);
  return factors;
}

bool same_types(const PrecisionKind& kind, const DataParallel& layout) {
  return bytes_of(kind.compute) == bytes_of(layout.compute) && kind.master == layout.master &&
         bytes_of(kind.gradient) == bytes_of(layout.gradient);
}

}  // namespace

std::vector<MemoryRow> memory_table(const ModelDescription& model, const DataParallel& layout, const MemoryOptions& options,
                                    int ranks) {
  require(ranks >= 1, "a table for {} ranks; allowed: at least 1", ranks);
  std::vector<MemoryRow> rows;
  for (const auto& kind : precision_kinds())
    for (const int shard : factors_to_try(ranks))
      for (const auto what : {Sharded::none, Sharded::optimizer, Sharded::gradients, Sharded::parameters}) {
        if ((shard == 1) != (what == Sharded::none)) continue;
        DataParallel tried = layout;
        tried.replicate = ranks / shard * layout.context.ranks;
        tried.shard = shard;
        tried.what = what;
        if (kind.compute != layout.compute) tried.scales = {};
        tried.compute = kind.compute;
        tried.master = kind.master;
        tried.gradient = tried.reduction = kind.gradient;
        if (shard != layout.shard) tried.reshard_ranks = 0;
        if (shard > 1 && tried.compression == Compression::powersgd) tried.compression = Compression::none;
        const auto memory = memory_of(model, tried, options);
        // With a factor of 1 nothing is sharded, whatever the layout says.
        const bool given = same_types(kind, layout) && shard == layout.shard && (shard == 1 || what == layout.what);
        rows.push_back({.kind = &kind,
                        .shard = shard,
                        .what = what,
                        .per_parameter = bytes_per_parameter(kind, tried.factors(), options.optimizer_states),
                        .reduction = reduction_factor(kind, tried.factors(), options.optimizer_states),
                        .state = memory.state,
                        .peak = memory.total(),
                        .given = given});
      }
  return rows;
}

}  // namespace bonfire::plan
