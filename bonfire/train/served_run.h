#pragma once

#include "bonfire/base/api.h"
#include "bonfire/comm/world.h"
#include "bonfire/server/options.h"
#include "bonfire/train/config.h"
#include "bonfire/train/loop.h"
#include "bonfire/train/report.h"

namespace bonfire {

// What [layout] says of the parameter server. REQUIRES: config is resolved, and has servers.
ServerOptions server_options_of(const Config& config, const Log& log);

// Which of its node's workers a worker is, and so which GPU it takes: servers take none.
BONFIRE_API int place_among_workers(int rank, int local_rank, int servers);

// train() where layout.server is 1 or more: the first ranks are servers and write what the run leaves behind, the others
// are workers, each a rank alone. Collective.
TrainReport train_served(const World& world, const Config& config, const TrainOptions& options);

}  // namespace bonfire
