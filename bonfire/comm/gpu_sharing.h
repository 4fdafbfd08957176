#pragma once

#include <string>

#include "bonfire/base/api.h"

namespace c10d {
class Store;
}

namespace bonfire {

struct GpuSharing {
  int on_mine = 1;       // ranks on this rank's GPU
  int most = 1;          // ranks on the most crowded one
  bool one_host = true;  // all ranks are on one machine
};

// Collective: how `size` ranks, each with the GPU and on the host that it names, share GPUs. What it costs a rank does not
// depend on how many there are. REQUIRES: keys under "gpu/" of the store are not used by anybody else.
BONFIRE_API GpuSharing count_gpu_sharing(c10d::Store& store, int size, const std::string& host, const std::string& gpu);

}  // namespace bonfire
