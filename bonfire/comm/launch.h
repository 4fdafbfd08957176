#pragma once

#include <functional>

#include "bonfire/base/api.h"
#include "bonfire/comm/join.h"
#include "bonfire/comm/world.h"

namespace bonfire {

// The whole of main for a program that trains and does nothing else. Under a launcher (ours, torchrun, Slurm, MPI) it joins
// as the rank that it is told to be; with `--ranks N` among its arguments, or BONFIRE_RANKS, it starts itself N times on
// this machine; under Kubeflow it starts this node's ranks; else it is alone. `program` gets the World, whose device is
// local_device()'s unless `options` choose another. Returns the exit code.
BONFIRE_API int launch(int argc, char** argv, const std::function<void(World&)>& program, JoinOptions options = {});

}  // namespace bonfire
