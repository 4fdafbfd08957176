#include "bonfire/shard/settings.h"

#include <utility>

#include "bonfire/base/error.h"
#include "bonfire/plan/course.h"

namespace bonfire {
namespace {

std::optional<at::ScalarType> wire_of(const ShardOptions& options) {
  if (options.precision.reduction) return options.precision.reduction;
  if (options.reduction.compression == plan::Compression::bf16) return at::kBFloat16;
  if (options.reduction.compression == plan::Compression::fp16) return at::kHalf;
  return std::nullopt;
}

}  // namespace

ShardSettings::ShardSettings(const Mesh& on, ShardOptions asked)
    : mesh(on),
      options(std::move(asked)),
      factors(plan::factors_of(options.what, mesh.shape().shard, options.accumulation)),
      wire(wire_of(options)) {
  const int factor = mesh.shape().shard;
  for (const Axis axis : {Axis::pipeline, Axis::context, Axis::tensor})
    if (mesh.shape().along(axis) > 1 && !(axis == Axis::pipeline && options.driven))
      fail_config("mesh axis {} is {}: this version keeps whole layers on every rank; allowed: 1", name_of(axis),
                  mesh.shape().along(axis));
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
                c10::toString(*precision.reduction), c10::toString(*kept), mesh.shape().replicate, c10::toString(*kept));
  if (options.reduction.compression == plan::Compression::powersgd && factor > 1)
    fail_config("PowerSGD with a sharding factor of {}: it needs whole matrices; allowed: a factor of 1", factor);
  if (options.offload == Offload::parameters && factors.parameters != factor)
    fail_config("offload of parameters with {} sharded and a factor of {}; allowed: sharded = parameters, or a factor of 1",
                plan::name_of(options.what), factor);
  if (!options.wrapping.apart.empty() && comes_and_goes() && !options.driven)
    fail_config(
        "wrapping.apart names parameter '{}', and parameters are gathered with their Unit: allowed without sharded or "
        "offloaded parameters, or in a pipeline",
        options.wrapping.apart.front().empty() ? "" : options.wrapping.apart.front().front());
  if (options.driven && options.uneven_inputs)
    fail_config("uneven_inputs with driven: a schedule has the same microbatches on all ranks; allowed: one of the two");
  if (const int to = options.reshard_after_forward.ranks; to < 0 || (to > 0 && factor % to != 0))
    fail_config("reshard_after_forward = {} with a sharding factor of {}; allowed: true, false, or a number that divides it",
                to, factor);
}

at::ScalarType ShardSettings::compute_type(const std::string& name, const at::Tensor& parameter, at::ScalarType own) const {
  const auto& precision = options.precision;
  return precision.keep && precision.keep(name, parameter) ? own : precision.parameters.value_or(own);
}

std::int64_t ShardSettings::scales(const std::string& name, const at::Tensor& parameter) const {
  if (!options.precision.scales) return 0;
  const auto count = options.precision.scales(name, parameter);
  if (count == 0) return 0;
  if (options.offload != Offload::none)
    fail_config("precision.scales with offload: parameter '{}' would be rounded on the host; allowed: one of the two", name);
  if (parameter.dim() != 2 || (count != 1 && count != parameter.size(0)))
    fail_config("precision.scales gives '{}', of {} dimensions, {} scales; allowed: of a matrix, 0, 1 or one for each row",
                name, parameter.dim(), count);
  return count;
}

at::ScalarType ShardSettings::whole_gradient_type(at::ScalarType master) const {
  const auto kept = options.precision.gradients.value_or(master);
  return factors.gradients > 1 ? wire.value_or(kept) : kept;
}

plan::BucketOptions ShardSettings::buckets(at::ScalarType gradient) const {
  auto buckets = options.buckets;
  buckets.gradient = plan_dtype(gradient);
  buckets.parts = mesh.shape().along(Axis::data);
  buckets.one_per_group = comes_and_goes();
  return buckets;
}

FlatOptions ShardSettings::flat_options() const {
  FlatOptions how{
      .factors = factors, .rank = mesh.coordinate(Axis::shard), .gradient = options.precision.gradients, .travelling = wire};
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
