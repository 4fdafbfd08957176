#pragma once

#include <memory>

#include <c10/util/intrusive_ptr.h>

#include "bonfire/comm/cuda_plugin.h"

namespace bonfire::cuda {

// Collective: connects `size` ranks that meet in `store`, at once and not at the first use, which would block the host
// there.
std::shared_ptr<Backend> make_nccl_backend(c10::intrusive_ptr<c10d::Store> store, int rank, int size,
                                           const NcclOptions& options);

}  // namespace bonfire::cuda
