#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "bonfire/shard/carried_state.h"
#include "bonfire/shard/driver.h"
#include "bonfire/shard/engine.h"
#include "bonfire/shard/flat_group.h"
#include "bonfire/shard/seam_driver.h"
#include "bonfire/shard/settings.h"

namespace bonfire {

struct Engine::State {
  // `memory`: see ScheduleDriver::engine.
  State(ShardSettings settings, torch::nn::Module& module, std::shared_ptr<EngineMemory> memory = nullptr);
  ~State();

  // That of a user's module; throws where a schedule drives.
  SeamDriver& seams();

  const ShardSettings settings;
  FlatGroup flats;
  std::unique_ptr<Driver> driver;
  std::shared_ptr<std::vector<std::int64_t>> places{};  // of groups, since slices(): what was written of them; null: nothing
  CarriedState carried{};
};

}  // namespace bonfire
