#include "bonfire/shard/settings.h"

#include <utility>

#include <fmt/ranges.h>

#include "bonfire/base/error.h"
#include "bonfire/plan/step_events.h"

namespace bonfire {
namespace {

std::optional<at::ScalarType> wire_of(const ShardOptions& options) {
  if (options.precision.reduction) return options.precision.reduction;
  if (options.reduction.compression == plan::Compression::bf16) return at::kBFloat16;
  if (options.reduction.compression == plan::Compression::fp16) return at::kHalf;
  return std::nullopt;
}

// Throws unless the parameter is the boxes, one on top of the other.
void require_filled(const std::string& name, const at::Tensor& parameter, const plan::Placement& placement) {
  const auto& shape = placement.shape;
  const auto dims = static_cast<std::size_t>(parameter.dim());
  bool fits = shape.size() == dims && !placement.boxes.empty();
  std::int64_t rows = 0;
  std::vector<std::string> words;
  for (const auto& [begin, end] : placement.boxes) {
    words.push_back(fmt::format("[{}] to [{}]", fmt::join(begin, ", "), fmt::join(end, ", ")));
    fits = fits && begin.size() == dims && end.size() == dims;
    for (std::size_t dim = 0; fits && dim < dims; ++dim)
      fits = begin[dim] >= 0 && begin[dim] <= end[dim] && end[dim] <= shape[dim] &&
             (dim == 0 || end[dim] - begin[dim] == parameter.size(static_cast<std::int64_t>(dim)));
    if (fits && dims > 0) rows += end[0] - begin[0];
  }
  if (fits && (dims == 0 || rows == parameter.size(0))) return;
  fail_config(
      "placement of parameter '{}', which is [{}], is {} of a tensor of shape [{}]; allowed: a part of the whole tensor "
      "that has the parameter's shape",
      name, fmt::join(parameter.sizes(), ", "), fmt::join(words, " and "), fmt::join(shape, ", "));
}

}  // namespace

ShardSettings::ShardSettings(const DataGroups& on, ShardOptions asked, DrivenBy driven_by)
    : groups(on),
      options(std::move(asked)),
      driver(driven_by),
      factors(plan::factors_of(options.what, groups.shards.size(), options.accumulation)),
      wire(wire_of(options)) {
  const int factor = groups.shards.size();
  if (groups.gathers.size() != factor || groups.all.size() != groups.replicas.size() * factor)
    fail_config(
        "groups of {} ranks in all, {} replicas, {} shards and {} that gather: all must be as many as replicas times "
        "shards, and gathers as many as shards",
        groups.all.size(), groups.replicas.size(), factor, groups.gathers.size());
  // Each has its part of what is gathered at its place in the group.
  if (groups.gathers.world_ranks() != groups.shards.world_ranks())
    fail_config("groups whose shards are ranks {} and whose gathers are ranks {}; allowed: the same ranks in the same order",
                fmt::join(groups.shards.world_ranks(), ", "), fmt::join(groups.gathers.world_ranks(), ", "));
  if (groups.splits.size() > 1 && !options.placement)
    fail_config(
        "a tensor axis of {} ranks, but no placement: say which part of each split parameter this rank has; allowed "
        "without it: 1",
        groups.splits.size());
  if (options.prefetch < 0) fail_config("prefetch is {}; allowed: 0 or more Units", options.prefetch);
  const auto& precision = options.precision;
  for (const auto& [key, type] : {std::pair{"parameters", precision.parameters},
                                  {"gradients", precision.gradients},
                                  {"reduction", precision.reduction},
                                  {"outputs", precision.outputs},
                                  {"buffers", precision.buffers}})
    if (type && *type != at::kDouble && *type != at::kFloat && *type != at::kBFloat16 && *type != at::kHalf)
      fail_config("precision.{} is {}; allowed: fp64, fp32, bf16 and fp16", key, c10::toString(*type));
  // Over the replicas gradients are reduced as they are kept, or rounded to fewer bytes.
  if (const auto kept = precision.gradients;
      replicated() && kept && precision.reduction && c10::elementSize(*precision.reduction) > c10::elementSize(*kept))
    fail_config("precision.reduction is {} for gradients kept in {} on {} replicas; allowed: {}, or fewer bytes",
                c10::toString(*precision.reduction), c10::toString(*kept), groups.replicas.size(), c10::toString(*kept));
  if (options.reduction.compression == plan::Compression::powersgd && factor > 1)
    fail_config("PowerSGD with a sharding factor of {}: it needs whole matrices; allowed: a factor of 1", factor);
  if (options.offload == Offload::parameters && factors.parameters != factor)
    fail_config("offload of parameters with {} sharded and a factor of {}; allowed: sharded = parameters, or a factor of 1",
                plan::name_of(options.what), factor);
  if (options.versions < 1) fail_config("versions is {}; allowed: 1 or more", options.versions);
  if (options.versions > 1 && options.reshard_after_forward.ranks > 1)
    fail_config(
        "versions = {} with reshard_after_forward = {}: what is kept for backward is of one version; allowed: true or "
        "false",
        options.versions, options.reshard_after_forward.ranks);
  if (driver == DrivenBy::schedule && options.uneven_inputs)
    fail_config("uneven_inputs in a pipeline: a schedule has the same microbatches on all ranks; allowed: one of the two");
  if (driver == DrivenBy::schedule && options.negotiate_order)
    fail_config(
        "negotiate_order in a pipeline: its schedule runs the Units in one order on all ranks, so there is nothing to agree "
        "on; allowed: one of the two");
  if (driver == DrivenBy::schedule && options.reshard_after_forward.ranks > 0)
    fail_config("reshard_after_forward = {} in a pipeline; allowed: true (one Unit at a time) or false (whole stages)",
                options.reshard_after_forward.ranks);
  if (driver == DrivenBy::schedule && comes_and_goes() && !gathers_units()) {
    if (options.backward_prefetch != BackwardPrefetch::before_reduction)
      fail_config(
          "backward_prefetch = after_reduction in a pipeline whose schedule says when whole stages are gathered; allowed: "
          "before_reduction, or reshard_after_forward = true");
    if (options.debug)
      fail_config(
          "debug = true in a pipeline whose schedule gathers and frees whole stages: all parameters of a stage are there "
          "while its Units run, so nothing would be checked; allowed: false, or reshard_after_forward = true");
  }
  if (const int to = options.reshard_after_forward.ranks; to < 0 || (to > 0 && factor % to != 0))
    fail_config("reshard_after_forward = {} with a sharding factor of {}; allowed: true, false, or a number that divides it",
                to, factor);
}

void ShardSettings::require_possible(const std::string& unit, const UnitOptions& own) const {
  const auto type = own.parameters.value_or(at::kFloat);
  if (type != at::kDouble && type != at::kFloat && type != at::kBFloat16 && type != at::kHalf)
    fail_config("the parameters of Unit '{}' are to be {} in forward; allowed: fp64, fp32, bf16 and fp16", unit,
                c10::toString(type));
  if (own.reshard_after_forward && comes_and_goes() && !gathers_units())
    fail_config(
        "Unit '{}' has a reshard_after_forward of its own, but whole stages are gathered; allowed: "
        "ShardOptions::reshard_after_forward = true, which gathers Units one by one",
        unit);
}

at::ScalarType ShardSettings::compute_type(const std::string& name, const at::Tensor& parameter, at::ScalarType own,
                                           const UnitOptions& unit) const {
  const auto& precision = options.precision;
  if (precision.keep && precision.keep(name, parameter)) return own;
  return unit.parameters.value_or(precision.parameters.value_or(own));
}

std::int64_t ShardSettings::scales(const std::string& name, const at::Tensor& parameter) const {
  if (!options.precision.scales) return 0;
  const auto count = options.precision.scales(name, parameter);
  if (count == 0) return 0;
  if (options.versions > 1)
    fail_config("precision.scales with versions = {}: scales are those of one version; allowed: one of the two",
                options.versions);
  if (options.offload != Offload::none)
    fail_config("precision.scales with offload: parameter '{}' would be rounded on the host; allowed: one of the two", name);
  if (parameter.dim() != 2 || (count != 1 && count != parameter.size(0)))
    fail_config(
        "precision.scales gives '{}', of {} dimensions, {} scales; allowed: 0, 1 or the number of rows, and only for "
        "matrices",
        name, parameter.dim(), count);
  return count;
}

plan::Placement ShardSettings::placement(const std::string& name, const at::Tensor& parameter) const {
  auto placement = options.placement ? options.placement(name, parameter) : plan::Placement{};
  // What they do not split, all of the ranks have that split the rest.
  if (!placement.split()) placement.copy = placement.copy * groups.splits.size() + groups.splits.rank();
  if (!placement.shape.empty()) require_filled(name, parameter, placement);
  return placement;  // where it says no shape, the layout says that it is all of it
}

at::ScalarType ShardSettings::whole_gradient_type(at::ScalarType master) const {
  const auto kept = options.precision.gradients.value_or(master);
  return factors.gradients > 1 ? wire.value_or(kept) : kept;
}

plan::BucketOptions ShardSettings::buckets(at::ScalarType gradient) const {
  auto buckets = options.buckets;
  buckets.gradient = plan_dtype(gradient);
  buckets.parts *= groups.all.size();
  buckets.one_per_group = buckets.one_per_group || comes_and_goes();
  return buckets;
}

FlatOptions ShardSettings::flat_options() const {
  FlatOptions how{.factors = factors,
                  .rank = groups.shards.rank(),
                  .gradient = options.precision.gradients,
                  .travelling = wire,
                  .versions = options.versions};
  if (options.offload == Offload::parameters) how.shard_device = at::kCPU;
  if (options.offload != Offload::none) how.master_device = at::kCPU;
  return how;
}

// Over the replicas gradients travel in the same numbers.
ReductionOptions ShardSettings::over_replicas() const {
  auto reduction = options.reduction;
  if (reduction.compression != plan::Compression::none) return reduction;
  if (wire == at::kBFloat16) reduction.compression = plan::Compression::bf16;
  if (wire == at::kHalf) reduction.compression = plan::Compression::fp16;
  return reduction;
}

std::size_t ShardSettings::whole_gradients() const {
  return static_cast<std::size_t>(plan::whole_gradient_limit({.prefetch = options.prefetch}));
}

}  // namespace bonfire
