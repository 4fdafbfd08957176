#pragma once

#include <cstdint>
#include <string_view>

#include "bonfire/base/api.h"

// What the two settings of data parallelism mean: the sharding factor F and what is sharded. Everything else that is known
// about ZeRO's stages follows from the numbers in `Factors`.
namespace bonfire::plan {

// What is divided among the ranks of a shard group. With a sharding factor of 1 nothing is, whatever this says.
enum class Sharded { none, optimizer, gradients, parameters };

// Between the microbatches of a step, gradients are kept by every rank as the share of them that it will use (and each
// microbatch is reduced), or whole (and only the last one is).
enum class Accumulation { sharded, full };

// What lies in the memory of the host instead of the device's: masters and optimizer state, or parameters as well.
enum class Offload { none, optimizer, parameters };

// By how much each kind of model state is divided: each is 1 or F.
struct Factors {
  int optimizer = 1;   // masters and optimizer state
  int gradients = 1;   // what is kept of them between microbatches and until the update
  int parameters = 1;  // what is kept of them while their Unit does not run
};

// The settings' table. Throws ConfigError for F > 1 with `none`.
BONFIRE_API Factors factors_of(Sharded what, int shard, Accumulation accumulation = Accumulation::sharded);

BONFIRE_API const char* name_of(Sharded what);
// Throws ConfigError for another name than none, optimizer, gradients, parameters.
BONFIRE_API Sharded sharded_of(std::string_view name);
// Throws ConfigError for another name than none, optimizer, parameters.
BONFIRE_API Offload offload_of(std::string_view name);

}  // namespace bonfire::plan
