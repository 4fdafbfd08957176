#pragma once

#include "bonfire/base/api.h"
#include "bonfire/comm/environment.h"

namespace bonfire {

inline constexpr const char* wait_policy_variable = "OMP_WAIT_POLICY";

// Threads of OpenMP that have nothing to do give up their core instead of spinning: beside other work, spinning threads
// keep those from running that they wait for, and a step takes a hundred times as long. OpenMP reads the variable when a
// process is loaded, so it is for one that is about to be started. True where it was added: not where the user has chosen
// (OMP_WAIT_POLICY, GOMP_SPINCOUNT).
BONFIRE_API bool wait_passively(Variables& variables);

}  // namespace bonfire
