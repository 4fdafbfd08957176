#pragma once

#include <optional>
#include <string>

#include "bonfire/comm/mesh.h"
#include "bonfire/plan/layout.h"
#include "bonfire/shard/engine.h"
#include "bonfire/shard/flat_parameter.h"

namespace bonfire {

// What the options of shard() come to on a mesh: the numbers that everything else follows from.
struct ShardSettings {
  // Throws ConfigError for options that cannot be.
  ShardSettings(const Mesh& mesh, ShardOptions options);

  // Whether parameters have memory only while their Unit runs.
  bool comes_and_goes() const { return factors.parameters > 1 || options.offload == Offload::parameters; }
  // Gradients that are kept as shares are reduced in every microbatch; others in the last alone.
  bool reduces_every_microbatch() const { return factors.gradients > 1; }
  // Gradients that a rank has whole, and averaged whole, are its user's to read, and to add to by another backward.
  bool gradients_readable() const { return factors.gradients == 1 && factors.optimizer == 1; }
  bool keeps_buffers_equal() const { return options.keep_buffers_equal && mesh.group(Axis::data).size() > 1; }
  bool replicated() const { return mesh.group(Axis::replicate).size() > 1; }
  // Along which ranks hold the same of every parameter.
  Axis of_copies() const { return factors.parameters == 1 ? Axis::data : Axis::replicate; }
  // What gradients are rounded to before they are scattered. Where nothing travels there is nothing to round.
  std::optional<at::ScalarType> scattered_in() const { return mesh.shape().shard > 1 ? wire : std::nullopt; }
  // What forward reads of a parameter. `own`: the type that it was given in.
  at::ScalarType compute_type(const std::string& name, const at::Tensor& parameter, at::ScalarType own) const;
  // How many scales go with a parameter that forward reads in eight bits while it is trained; 0: it does not.
  std::int64_t scales(const std::string& name, const at::Tensor& parameter) const;
  // In which backward writes the whole gradient of a parameter with a master of this type.
  at::ScalarType whole_gradient_type(at::ScalarType master) const;
  plan::BucketOptions buckets(at::ScalarType gradient) const;
  FlatOptions flat_options() const;
  ReductionOptions over_replicas() const;
  std::size_t whole_gradients() const;  // that exist at a time, at most

  Mesh mesh;
  ShardOptions options;
  plan::Factors factors;
  std::optional<at::ScalarType> wire;  // what gradients travel in, where that is said
};

}  // namespace bonfire
