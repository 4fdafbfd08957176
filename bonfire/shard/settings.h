#pragma once

#include <optional>
#include <string>

#include "bonfire/comm/data_groups.h"
#include "bonfire/plan/layout.h"
#include "bonfire/shard/engine.h"
#include "bonfire/shard/flat_parameter.h"

namespace bonfire {

// Who decides when parameters are gathered and freed, and when gradients are reduced.
enum class DrivenBy {
  seams,     // of a user's module, and Engine::backward
  schedule,  // of a pipeline that runs the module
};

// What the options of shard() come to on these ranks: the numbers that everything else follows from.
struct ShardSettings {
  // Throws ConfigError for options that cannot be.
  ShardSettings(const DataGroups& groups, ShardOptions options, DrivenBy driver = DrivenBy::seams);

  // Whether parameters have memory only while their Unit runs.
  bool comes_and_goes() const {
    return factors.parameters > 1 || options.offload == Offload::parameters || options.versions > 1;
  }
  // Whether the seams of Units gather and free them. Otherwise a schedule does so with all of a module.
  bool gathers_units() const {
    return comes_and_goes() &&
           (driver == DrivenBy::seams || (options.reshard_after_forward.said && options.reshard_after_forward.free));
  }
  // Gradients that are kept as shares are reduced in every microbatch; others in the last alone.
  bool reduces_every_microbatch() const { return factors.gradients > 1; }
  // Gradients that a rank has whole, and averaged whole, are its user's to read, and to add to by another backward.
  bool gradients_readable() const { return factors.gradients == 1 && factors.optimizer == 1; }
  bool keeps_buffers_equal() const { return options.keep_buffers_equal && groups.all.size() > 1; }
  bool replicated() const { return groups.replicas.size() > 1; }
  // The ranks that hold the same of every parameter.
  const Group& copies() const { return factors.parameters == 1 ? groups.all : groups.replicas; }
  // Throws ConfigError for what no Unit can have for itself here. `unit`: its path.
  void require_possible(const std::string& unit, const UnitOptions& own) const;
  // What gradients are rounded to before they are scattered. Where nothing travels there is nothing to round.
  std::optional<at::ScalarType> scattered_in() const { return groups.shards.size() > 1 ? wire : std::nullopt; }
  // What forward reads of a parameter of a Unit. `own`: the type that it was given in.
  at::ScalarType compute_type(const std::string& name, const at::Tensor& parameter, at::ScalarType own,
                              const UnitOptions& unit = {}) const;
  // How many scales go with a parameter that forward reads in eight bits while it is trained; 0: it does not.
  std::int64_t scales(const std::string& name, const at::Tensor& parameter) const;
  // What a parameter is in the whole model, as the options say. Throws ConfigError for a box that it does not fill.
  plan::Placement placement(const std::string& name, const at::Tensor& parameter) const;
  // In which backward writes the whole gradient of a parameter with a master of this type.
  at::ScalarType whole_gradient_type(at::ScalarType master) const;
  plan::BucketOptions buckets(at::ScalarType gradient) const;
  FlatOptions flat_options() const;
  ReductionOptions over_replicas() const;
  std::size_t whole_gradients() const;  // that exist at a time, at most

  DataGroups groups;
  ShardOptions options;
  DrivenBy driver;
  plan::Factors factors;
  std::optional<at::ScalarType> wire;  // what gradients travel in, where that is said
};

}  // namespace bonfire
