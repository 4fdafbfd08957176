#include "bonfire/plan/sharding.h"

#include "bonfire/base/error.h"

namespace bonfire::plan {

Factors factors_of(Sharded what, int shard, Accumulation accumulation) {
  require(shard >= 1, "sharding factor is {}, must be at least 1", shard);
  if (what == Sharded::none && shard > 1)
    fail_config("sharding factor {} with nothing sharded; allowed: a factor of 1, or optimizer | gradients | parameters",
                shard);
  Factors factors;
  if (what >= Sharded::optimizer) factors.optimizer = shard;
  if (what >= Sharded::gradients && accumulation == Accumulation::sharded) factors.gradients = shard;
  if (what >= Sharded::parameters) factors.parameters = shard;
  return factors;
}

const char* name_of(Sharded what) {
  switch (what) {
    case Sharded::none: return "none";
    case Sharded::optimizer: return "optimizer";
    case Sharded::gradients: return "gradients";
    case Sharded::parameters: return "parameters";
  }
  return "?";
}

Sharded sharded_of(std::string_view name) {
  for (const auto what : {Sharded::none, Sharded::optimizer, Sharded::gradients, Sharded::parameters})
    if (name == name_of(what)) return what;
  fail_config("sharded = \"{}\" is not known; allowed: none | optimizer | gradients | parameters", name);
}

Offload offload_of(std::string_view name) {
  if (name == "none") return Offload::none;
  if (name == "optimizer") return Offload::optimizer;
  if (name == "parameters") return Offload::parameters;
  fail_config("offload = \"{}\" is not known; allowed: none | optimizer | parameters", name);
}

}  // namespace bonfire::plan
