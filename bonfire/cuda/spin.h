#pragma once

#include <cstdint>

#include <cuda_runtime_api.h>

namespace bonfire::cuda {

// Launchers of kernels: plain functions, so that neither side sees the other's headers.
void launch_spin(std::int64_t nanoseconds, cudaStream_t stream);

}  // namespace bonfire::cuda
