#pragma once

#include <cstdint>
#include <string>

#include "bonfire/base/api.h"
#include "bonfire/plan/profile.h"
#include "bonfire/train/config.h"

namespace bonfire {

// Leaves of [layout] what a Unit alone is as well: which activations it makes again. Resolve it for one rank then.
BONFIRE_API void keep_units_alone(Config& config);

// What a profile of this configuration's model says of itself: another model, or another batch, has another one. `model`
// ends with a checksum of all keys that a Unit's costs follow from.
struct ProfileStamp {
  std::string model;
  std::int64_t batch = 0, microbatch = 0;
  std::string device;
};
// REQUIRES: config is resolved, for one rank.
BONFIRE_API ProfileStamp profile_stamp(const Config& config);
// Throws ConfigError, naming the profile's file, where it is of something else.
BONFIRE_API void require_same_model(const plan::Profile& profile, const std::string& file, const Config& config);

// Runs the Units of the model alone, each `repeats` times behind a warm-up. Times, outputs and what is saved are those
// of a minibatch, in as many microbatches as the configuration says. REQUIRES: as above.
BONFIRE_API plan::Profile profile_model(const Config& config, int repeats);

}  // namespace bonfire
