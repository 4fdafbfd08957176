#pragma once

#include <string>

#include "bonfire/base/api.h"

namespace bonfire {

// How many cores this process may keep busy: those it may run on (taskset, Slurm), but no more than the CPU quota of its
// container (cgroup v1 and v2, its own and those above it), rounded up; at least 1.
BONFIRE_API int usable_cores();

// The quota in cores that `own` (/proc/self/cgroup) leads to below `root` (/sys/fs/cgroup); 0: none.
BONFIRE_API double cpu_quota(const std::string& own, const std::string& root);

}  // namespace bonfire
