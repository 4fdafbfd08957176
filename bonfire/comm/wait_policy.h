#pragma once

#include "bonfire/base/api.h"
#include "bonfire/comm/environment.h"

namespace bonfire {

inline constexpr const char* spin_variable = "GOMP_SPINCOUNT";
// About as long as it takes to wake a thread: longer does not pay. Ten times as many looks are no quicker on an idle
// machine; none at all make a step of a small model up to three times as long.
inline constexpr const char* short_spin = "3000";

// Threads of OpenMP that have nothing to do look for work for a short time, then give up their core. libgomp's own 300,000
// looks keep those threads from running that are waited for, where the machine does something else as well: a step then
// takes a hundred times as long. OpenMP reads the variable when a process is loaded, so it is for one that is about to be
// started. True where it was added: not where the user has chosen (OMP_WAIT_POLICY, GOMP_SPINCOUNT).
BONFIRE_API bool spin_shortly(Variables& variables);

}  // namespace bonfire
