#pragma once

#include <cstdint>

#include "bonfire/base/api.h"
#include "bonfire/plan/dtype.h"
#include "bonfire/plan/memory.h"

namespace bonfire::plan {

// The convolution of a Unit that has one, of a sample, in elements: three by three, as large before as after.
struct Convolution {
  std::int64_t input_channels = 0, output_channels = 0, pixels = 0;
  std::int64_t input() const { return input_channels * pixels; }
  std::int64_t output() const { return output_channels * pixels; }
};

// What the CPU's kernels have of their own in the backward of a convolution: in elements of a sample, and in bytes of all
// samples while its weight's gradient is made.
struct ConvolutionWorkspace {
  std::int64_t elements = 0, gradient_bytes = 0;
};
BONFIRE_API ConvolutionWorkspace convolution_workspace(const Convolution& of, Dtype compute, const MemoryOptions& options);

}  // namespace bonfire::plan
