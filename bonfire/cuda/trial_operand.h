#pragma once

#include <cstdint>

#include <cuda_runtime_api.h>

// What products are tried on.
namespace bonfire::cuda {

// Adds to `repeats` how many of `count` 4-byte words are equal to the one before them.
void launch_count_repeats(const std::uint32_t* words, std::int64_t count, std::uint64_t* repeats, cudaStream_t stream);

enum class TrialElement { f32, f64, bf16, f16, e4m3, e5m2 };
// Numbers between -2 and 2, about half of them below 0.6 in magnitude, with all the digits that the type has.
void launch_random_elements(void* to, std::int64_t count, TrialElement type, cudaStream_t stream);

}  // namespace bonfire::cuda
