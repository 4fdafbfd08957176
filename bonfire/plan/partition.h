#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "bonfire/base/api.h"
#include "bonfire/plan/cuts.h"
#include "bonfire/plan/profile.h"
#include "bonfire/schedule/pipedream.h"

// PipeDream's partitioner: which Units are a stage, and on how many ranks each stage runs. docs/pipedream.md has the
// formulas.
namespace bonfire::plan {

// Ranks that are connected alike: GPUs in a machine, machines in a rack.
struct TopologyLevel {
  int count = 1;         // of components: ranks at the lowest level, above it what the level below consists of
  double bandwidth = 0;  // bytes per second between two of them
};

struct Topology {
  std::vector<TopologyLevel> levels;     // the lowest first
  std::optional<std::int64_t> memory{};  // bytes of a rank; nothing: not a limit

  BONFIRE_API int ranks() const;
};

// "8@25e9,4@1.25e9", the lowest level first, or a TOML file with [[level]] count, bandwidth, and memory = "16GiB". Throws
// ConfigError.
BONFIRE_API Topology parse_topology(const std::string& text);

struct StageMemory {
  std::int64_t weights = 0;      // all versions, and masters where they lie apart
  std::int64_t state = 0;        // gradients and optimizer state
  std::int64_t activations = 0;  // of the minibatches in flight

  std::int64_t total() const { return weights + state + activations; }
};

struct PartitionedStage {
  int first_cut = -1, last_cut = 0;  // what lies between them
  std::vector<int> units{};          // in an order in which they can run
  int replicas = 1;
  int in_flight = 1;   // minibatches on one replica whose backward has not ended
  int versions = 1;    // of its weights
  double seconds = 0;  // computation of one minibatch, on one replica
  StageMemory memory{};
};

struct Partition {
  std::vector<PartitionedStage> stages;
  double seconds = 0;                // from one minibatch to the next: the slowest stage, synchronisation or link
  double data_parallel_seconds = 0;  // the same with all Units on all ranks
  double one_rank_seconds = 0;
  int in_flight = 1;            // minibatches that each replica of the first stage admits; see RoundRobin's modes
  int microbatches = 1;         // of a minibatch
  std::int64_t considered = 0;  // ways to end a part of the model that were compared

  BONFIRE_API int ranks() const;
};

struct PartitionOptions {
  schedule::WeightMode mode = schedule::WeightMode::stashing;
  int microbatches = 0;  // of a minibatch; 0: as the profile says
};

// The fastest partition on all ranks of the topology. Throws ConfigError where there is none, or none fits into memory, and
// where the mode needs the microbatches of a minibatch and nobody says how many there are.
BONFIRE_API Partition partition(const Profile& profile, const Topology& topology, const PartitionOptions& options = {});

// Seconds from one minibatch to the next with all Units on all ranks.
BONFIRE_API double data_parallel_seconds(const Cut& whole, const Topology& topology,
                                         schedule::WeightMode mode = schedule::WeightMode::stashing);

}  // namespace bonfire::plan
