#pragma once

#include <memory>
#include <optional>

#include <c10/core/Device.h>
#include <c10/core/StreamGuard.h>

#include "bonfire/base/api.h"
#include "bonfire/comm/data_groups.h"
#include "bonfire/comm/device.h"
#include "bonfire/comm/mesh.h"
#include "bonfire/comm/world.h"
#include "bonfire/data/loader.h"
#include "bonfire/optim/grad_scaler.h"
#include "bonfire/optim/learning_rate.h"
#include "bonfire/train/config.h"
#include "bonfire/train/memory.h"
#include "bonfire/train/run_data.h"
#include "bonfire/train/trainee.h"

namespace bonfire {

class WholeModel;

// Throws ConfigError where this GPU cannot compute in the precision that is asked for.
BONFIRE_API void require_precision(const Config& config, const GpuInfo& gpu);

// The device of a rank: what [run] device means on this machine. Throws ConfigError where it asks for a GPU that is not
// there or that cannot compute in train.precision.
BONFIRE_API c10::Device device_of(const Config& config, int local_rank);

// For its lifetime the calling thread computes on a stream of its own, where the device has streams: work on the default one
// cannot be captured. REQUIRES: destroyed by the thread that made it, last made first.
class BONFIRE_API ComputeStream {
 public:
  explicit ComputeStream(c10::Device device);

 private:
  std::optional<c10::StreamGuard> guard_;
};

// Everything that takes part in a run, on one rank. Later members use earlier ones.
struct BONFIRE_API Run {
  // Collective. REQUIRES: config is resolved for world.size() ranks.
  Run(const World& world, const Config& config);
  // REQUIRES: no pipeline.
  WholeModel& whole() const;
  Run(const Run&) = delete;
  Run& operator=(const Run&) = delete;

  World world;
  Config config;
  ComputeStream stream;
  MemoryMeter memory;
  MemoryCap cap;
  RunData data;
  Mesh mesh;
  DataGroups groups;  // who averages gradients; who reads which samples, the mesh's data axis says
  std::unique_ptr<Trainee> trainee;
  std::optional<GradScaler> scaler;  // fp16 only
  LearningRate learning_rate;
  Loader loader;
  std::int64_t skipped = 0;    // updates left out so far
  std::int64_t rollbacks = 0;  // how often it has gone back to a checkpoint
};

}  // namespace bonfire
