#include "bonfire/plan/layout.h"

#include <algorithm>
#include <numeric>

#include "bonfire/base/error.h"
#include "bonfire/base/size.h"

namespace bonfire::plan {
namespace {

std::int64_t trained_elements(const ParameterGroup& group) {
  std::int64_t sum = 0;
  for (const auto& parameter : group.parameters)
    if (parameter.trained) sum += round_up(parameter.elements, segment_alignment);
  return sum;
}

// Places the parameters of the layout's groups: trained ones first.
void place(FlatLayout& layout, const std::vector<ParameterGroup>& groups, int shard) {
  std::int64_t offset = 0;
  for (const bool trained : {true, false}) {
    for (const std::size_t at : layout.groups)
      for (const auto& parameter : groups[at].parameters) {
        if (parameter.trained != trained) continue;
        layout.segments.push_back({parameter.name, offset, parameter.elements, trained});
        offset = round_up(offset + parameter.elements, segment_alignment);
      }
    offset = round_up(offset, segment_alignment * shard);
    if (trained) layout.trained = offset;
  }
  layout.total = offset;
}

}  // namespace

std::vector<FlatLayout> bucket(const std::vector<ParameterGroup>& groups, const BucketOptions& options) {
  require(options.shard >= 1, "sharding factor is {}, must be at least 1", options.shard);
  require(options.bucket_bytes > 0 && options.first_bucket_bytes > 0, "bucket sizes are {} and {} bytes, must be positive",
          options.first_bucket_bytes, options.bucket_bytes);
  std::vector<FlatLayout> layouts;
  std::int64_t bytes = 0;
  bool open = false;
  for (std::size_t at = 0; at < groups.size(); ++at) {
    if (!open) layouts.emplace_back(), bytes = 0;
    layouts.back().groups.push_back(at);
    bytes += trained_elements(groups[at]) * options.element_bytes;
    open = bytes < (layouts.size() == 1 ? options.first_bucket_bytes : options.bucket_bytes);
  }
  for (auto& layout : layouts) place(layout, groups, options.shard);
  return layouts;
}

std::vector<ParameterGroup> groups_in_backward_order(const ModelDescription& model) {
  std::vector<ParameterGroup> groups;
  for (auto unit = model.units.rbegin(); unit != model.units.rend(); ++unit) {
    if (unit->parameters.empty()) continue;
    ParameterGroup group{unit->name, {}};
    for (const auto& parameter : unit->parameters)
      group.parameters.push_back({unit->name.empty() ? parameter.name : unit->name + "." + parameter.name,
                                  parameter.elements(), parameter.shape, parameter.trained});
    groups.push_back(std::move(group));
  }
  return groups;
}

LowRank low_rank(const std::vector<std::int64_t>& shape, int rank) {
  if (shape.size() < 2) return {};
  const std::int64_t rows = shape.front();
  const std::int64_t columns = std::accumulate(shape.begin() + 1, shape.end(), std::int64_t{1}, std::multiplies<>());
  const std::int64_t usable = std::min<std::int64_t>({rank, rows, columns});
  // Only where the two factors are smaller than the matrix.
  if (usable * (rows + columns) >= rows * columns) return {};
  return {rows, columns, usable};
}

std::vector<Collective> collectives_of_step(const ModelDescription& model, const DataParallel& layout) {
  std::vector<Collective> list;
  if (layout.replicate == 1) return list;
  const auto reduce = [&](std::int64_t bytes) {
    if (bytes > 0) list.push_back({CollectiveKind::all_reduce, Axis::replicate, bytes});
  };
  const auto groups = groups_in_backward_order(model);
  const auto buckets = bucket(groups, layout.buckets);
  const std::int64_t bytes = layout.buckets.element_bytes;
  if (layout.compression == Compression::powersgd) {
    // Each bucket: the left factors with everything that is not compressed behind them, while backward runs; the right
    // factors when it has ended.
    std::vector<std::int64_t> right(buckets.size());
    for (std::size_t at = 0; at < buckets.size(); ++at) {
      std::int64_t left = 0;
      for (const std::size_t group : buckets[at].groups)
        for (const auto& parameter : groups[group].parameters) {
          if (!parameter.trained) continue;
          const auto low = low_rank(parameter.shape, layout.powersgd_rank);
          left += low.rank ? low.rows * low.rank : parameter.elements;
          right[at] += low.columns * low.rank;
        }
      reduce(left * bytes);
    }
    for (const std::int64_t elements : right) reduce(elements * bytes);
  } else {
    for (const auto& flat : buckets) reduce(flat.trained * (layout.compression == Compression::none ? bytes : 2));
  }
  if (layout.buffer_bytes) list.push_back({CollectiveKind::broadcast, Axis::replicate, layout.buffer_bytes});
  list.push_back({CollectiveKind::all_reduce, Axis::data, 8});
  return list;
}

}  // namespace bonfire::plan
