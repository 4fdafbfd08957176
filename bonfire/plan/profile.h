#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bonfire/base/api.h"

// What a model's Units cost, measured on one rank: what PipeDream's partitioner works from.
namespace bonfire::plan {

struct UnitProfile {
  std::string name;
  double forward = 0, backward = 0;                // seconds of one minibatch: the median
  double forward_spread = 0, backward_spread = 0;  // seconds between the quartiles
  std::int64_t output_bytes = 0;                   // of what goes to the Units behind it
  std::int64_t parameter_bytes = 0;
  std::int64_t state_bytes = 0;  // of gradients and optimizer state
  std::int64_t saved_bytes = 0;  // that a forward keeps for its backward
};

struct Profile {
  std::string model;            // as the command describes it
  std::int64_t batch = 0;       // samples of a minibatch; 0: the file does not say
  std::int64_t microbatch = 0;  // samples of a microbatch; likewise
  std::string device;
  std::vector<UnitProfile> units{};
  // From a Unit to one that reads its output. Empty: the Units are a chain.
  std::vector<std::pair<int, int>> edges{};

  bool chain() const { return edges.empty(); }
  // Of a minibatch; 0: the file does not say.
  std::int64_t microbatches() const { return microbatch > 0 ? batch / microbatch : 0; }
};

// A profile as `bonfire profile` writes it, or a collection of PipeDream's, of which `model` names one (it may be empty
// where there is no choice). Of PipeDream's graphs, what reads the input from the disk and what nobody reads is left out.
// Throws ConfigError.
BONFIRE_API Profile read_profile(const std::filesystem::path& file, std::string_view model = {});
// REQUIRES: a chain.
BONFIRE_API std::string to_json(const Profile& profile);

}  // namespace bonfire::plan
