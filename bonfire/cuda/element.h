#pragma once

#include <cuda_runtime_api.h>

namespace bonfire::cuda {

// The types of elements that kernels know. Launchers are plain functions over device memory and these, so that neither side
// sees the other's headers.
enum class Element { f32, f64, bf16, f16 };

}  // namespace bonfire::cuda
