#pragma once

#include <functional>

#include "bonfire/comm/world.h"

namespace bonfire::testing {

// Runs `body` as `ranks` ranks, each a thread, over one in-process store. When all have ended, the first error is rethrown.
// Collectives time out after some seconds, so a rank that died does not leave the others waiting for long.
void run_ranks(int ranks, const std::function<void(World&)>& body, WorldOptions options = {});

}  // namespace bonfire::testing
