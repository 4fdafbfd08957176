#pragma once

#include <cstdint>

#include <cuda_runtime_api.h>

namespace bonfire::cuda {

// Adds to `sum` a number that depends on every bit of `count` 4-byte words and on where they are, and not on who adds when.
void launch_checksum(const std::uint32_t* words, std::int64_t count, std::uint64_t* sum, cudaStream_t stream);

}  // namespace bonfire::cuda
