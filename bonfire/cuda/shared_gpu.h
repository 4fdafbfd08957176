#pragma once

#include <c10/core/Device.h>

namespace c10d {
class Store;
}

namespace bonfire::cuda {

// NCCL refuses two ranks on one GPU unless they seem to be on different machines. Finds out whether this rank shares its GPU
// with another of the World and, if so, gives it a machine name of its own (NCCL_HOSTID); where all ranks are on one machine
// they are also told to meet over loopback. What the user has set stays. Right for finding mistakes, far too slow for speed.
// Returns how many ranks the most crowded GPU has.
//
// Collective. REQUIRES: called before the process's first communicator, when NCCL reads these variables.
int let_ranks_share_gpus(c10d::Store& store, int rank, int size, c10::Device device);

}  // namespace bonfire::cuda
