#include "bonfire/plan/layout.h"

#include <algorithm>
#include <numeric>
#include <tuple>
#include <utility>

#include "bonfire/base/error.h"
#include "bonfire/base/size.h"
#include "bonfire/plan/building.h"
#include "bonfire/plan/step_events.h"

namespace bonfire::plan {
namespace {

std::int64_t padded_elements(const ParameterGroup& group) {
  std::int64_t sum = 0;
  for (const auto& parameter : group.parameters) sum += round_up(parameter.elements, segment_alignment);
  return sum;
}

Placement placement_of(const ParameterSize& parameter) {
  auto placement = parameter.placement;
  if (placement.name.empty()) placement.name = parameter.name;
  if (placement.shape.empty()) {
    placement.shape = parameter.shape;
    placement.boxes = {whole_box(placement.shape)};
  }
  return placement;
}

// The region that parameters like this one lie in, still without elements.
Region kind_of(const ParameterSize& parameter, const Placement& placement) {
  return {.compute = parameter.compute,
          .master = parameter.master,
          .trained = parameter.trained,
          .split = placement.split(),
          .tie = placement.tie,
          .copy = placement.copy};
}

bool alike(const Region& one, const Region& other) {
  const auto kind = [](const Region& of) { return std::tie(of.compute, of.master, of.trained, of.split, of.tie, of.copy); };
  return kind(one) == kind(other);
}

// Places the parameters of the layout's groups, like with like, in the order in which they are met; trained ones first.
void place(FlatLayout& layout, const std::vector<ParameterGroup>& groups, int parts) {
  for (const bool trained : {true, false}) {
    const auto region_of = [&](const ParameterSize& parameter, const Placement& placement) {
      const auto kind = kind_of(parameter, placement);
      for (std::size_t at = 0; at < layout.regions.size(); ++at)
        if (alike(layout.regions[at], kind)) return at;
      layout.regions.push_back(kind);
      return layout.regions.size() - 1;
    };
    for (const std::size_t group : layout.groups)
      for (const auto& parameter : groups[group].parameters) {
        if (parameter.trained != trained) continue;
        auto placement = placement_of(parameter);
        const std::size_t region = region_of(parameter, placement);
        auto& end = layout.regions[region].elements;
        layout.segments.push_back({parameter.name, region, end, parameter.elements, parameter.scales, std::move(placement)});
        end = round_up(end + parameter.elements, segment_alignment);
      }
  }
  for (auto& region : layout.regions) {
    // Also where all its parameters are empty: a buffer has something to lend and to gather.
    region.elements = round_up(std::max<std::int64_t>(region.elements, 1), segment_alignment * parts);
    region.begin = layout.bytes;
    layout.bytes += region.bytes();
  }
}

}  // namespace

std::int64_t FlatLayout::trained_elements() const {
  std::int64_t sum = 0;
  for (const auto& region : regions) sum += region.trained ? region.elements : 0;
  return sum;
}

std::int64_t FlatLayout::trained_bytes() const {
  std::int64_t sum = 0;
  for (const auto& region : regions) sum += region.trained ? region.bytes() : 0;
  return sum;
}

std::int64_t FlatLayout::scales() const {
  std::int64_t sum = 0;
  for (const auto& segment : segments) sum += round_up(segment.scales, scale_alignment);
  return sum;
}

bool FlatLayout::any_trained() const { return !regions.empty() && regions.front().trained; }

bool same_parameters(const FlatLayout& a, const FlatLayout& b) {
  if (a.regions != b.regions || a.segments.size() != b.segments.size()) return false;
  const auto sorted = [](std::vector<Segment> segments) {
    for (auto& segment : segments) segment.offset = 0;
    std::sort(segments.begin(), segments.end(), [](const auto& one, const auto& other) { return one.name < other.name; });
    return segments;
  };
  return sorted(a.segments) == sorted(b.segments);
}

std::vector<FlatLayout> bucket(const std::vector<ParameterGroup>& groups, const BucketOptions& options) {
  require(options.parts >= 1, "a region in {} parts: must be at least 1", options.parts);
  require(options.bucket_bytes > 0 && options.first_bucket_bytes > 0, "bucket sizes are {} and {} bytes, must be positive",
          options.first_bucket_bytes, options.bucket_bytes);
  std::vector<FlatLayout> layouts;
  std::int64_t bytes = 0;
  bool open = false;
  for (std::size_t at = 0; at < groups.size(); ++at) {
    if (!open) layouts.emplace_back(), bytes = 0;
    layouts.back().groups.push_back(at);
    // Frozen ones count as well: while a buffer is made its parameters exist twice.
    bytes += padded_elements(groups[at]) * bytes_of(options.gradient);
    open = !options.one_per_group && bytes < (layouts.size() == 1 ? options.first_bucket_bytes : options.bucket_bytes);
  }
  for (auto& layout : layouts) place(layout, groups, options.parts);
  return layouts;
}

namespace {

// The Unit whose backward is the last to add to a trained parameter of the root: of those that read one, the first in
// forward.
std::size_t last_to_reach(const ModelDescription& model, const UnitDescription& root) {
  for (std::size_t at = 0; at < model.units.size(); ++at)
    for (const auto& name : model.units[at].shared)
      if (std::any_of(root.parameters.begin(), root.parameters.end(),
                      [&](const auto& parameter) { return parameter.trained && parameter.name == name; }))
        return at;
  return 0;
}

std::vector<ParameterGroup> groups_of(const ModelDescription& model, bool known) {
  // By the Unit whose backward finishes them; of two, the root comes later.
  std::vector<std::pair<std::size_t, const UnitDescription*>> order;
  for (std::size_t at = 0; at < model.units.size(); ++at) {
    const auto& unit = model.units[at];
    if (unit.parameters.empty()) continue;
    const bool root = unit.kind == UnitKind::root;
    order.emplace_back(root ? 2 * (known ? last_to_reach(model, unit) : 0) : 2 * at + 1, &unit);
  }
  std::stable_sort(order.begin(), order.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
  std::vector<ParameterGroup> groups;
  for (const auto& [at, unit] : order) {
    ParameterGroup group{unit->name, {}};
    for (const auto& parameter : unit->parameters)
      group.parameters.push_back({.name = full_name(*unit, parameter),
                                  .elements = parameter.elements(),
                                  .shape = parameter.shape,
                                  .trained = parameter.trained,
                                  .placement = placement_in(model, parameter)});
    groups.push_back(std::move(group));
  }
  std::stable_partition(groups.begin(), groups.end(), [](const ParameterGroup& group) {
    return std::any_of(group.parameters.begin(), group.parameters.end(), [](const auto& one) { return one.trained; });
  });
  return groups;
}

}  // namespace

std::vector<ParameterGroup> groups_in_backward_order(const ModelDescription& model) { return groups_of(model, true); }
std::vector<ParameterGroup> groups_in_likely_order(const ModelDescription& model) { return groups_of(model, false); }

std::vector<FlatLayout> flats_of(const ModelDescription& model, const DataParallel& layout) {
  return flats_of(groups_in_backward_order(model), layout);
}

std::vector<FlatLayout> flats_of(std::vector<ParameterGroup> groups, const DataParallel& layout) {
  for (auto& group : groups)
    for (auto& parameter : group.parameters) {
      parameter.master = layout.master;
      parameter.compute = layout.keep && layout.keep(parameter.name) ? layout.master : layout.compute;
      parameter.scales = layout.scales && parameter.trained ? layout.scales(parameter.name, parameter.shape) : 0;
      if (parameter.scales > 0) parameter.compute = Dtype::fp8;
    }
  BucketOptions options = layout.buckets;
  options.gradient = layout.gradient;
  options.parts *= layout.ranks();
  options.one_per_group = options.one_per_group || layout.comes_and_goes();
  return bucket(groups, options);
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

}  // namespace bonfire::plan
