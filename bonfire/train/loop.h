#pragma once

#include <filesystem>
#include <functional>
#include <optional>

#include "bonfire/base/api.h"
#include "bonfire/comm/world.h"
#include "bonfire/train/config.h"
#include "bonfire/train/progress.h"
#include "bonfire/train/report.h"

namespace bonfire {

class StopVote;

struct TrainOptions {
  std::filesystem::path folder;                     // the run folder, which exists; the same on all ranks
  std::optional<ProgressLine::Options> progress{};  // what rank 0 shows of the steps; nothing: no words
  StopVote* stop = nullptr;                         // by which the run may end before its last step; null: it cannot
  bool resume = false;               // goes on from the newest checkpoint in the folder, where there is one; else:
  std::filesystem::path begin_with;  // begins with this checkpoint; empty: afresh
  // A worker of a parameter server calls it once the run can bear its loss (layout.server_lost).
  std::function<void()> may_be_lost{};
  bool is_measurement = false;  // of whose weights nobody asks where they are
};

// Trains as `config` says and leaves metrics, events and, where asked, a trace in the folder.
// Collective. REQUIRES: config is resolved for world.size() ranks. Throws Error where a loss or gradient that is not finite
// ends the run (train.nan_policy), with the same words on all ranks.
BONFIRE_API TrainReport train(const World& world, const Config& config, const TrainOptions& options);

}  // namespace bonfire
