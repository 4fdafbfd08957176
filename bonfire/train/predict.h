#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "bonfire/base/api.h"
#include "bonfire/plan/layout.h"
#include "bonfire/train/config.h"

namespace bonfire {

// The data-parallel part of the layout in plan's words. REQUIRES: config is resolved.
BONFIRE_API plan::DataParallel data_parallel_of(const Config& config);

// Bytes of tensors that a rank holds at the peak of a step, from the configuration alone; within a tenth of what happens
// where the model is more than a toy.
struct MemoryPrediction {
  std::int64_t parameters = 0;  // what forward reads, and fp32 masters where it reads something smaller
  std::int64_t gradients = 0;
  std::int64_t optimizer = 0;
  std::int64_t communication = 0;  // compressed gradients and what PowerSGD remembers
  std::int64_t activations = 0;    // of one microbatch, and the largest gradient among them
  std::int64_t data = 0;           // batches that are ready or in use

  std::int64_t total() const { return parameters + gradients + optimizer + communication + activations + data; }
};

BONFIRE_API MemoryPrediction predict_memory(const Config& config);

// Floating-point operations of forward and backward of one whole batch, recomputation not counted.
BONFIRE_API double step_flops(const Config& config);

// The most floating-point operations a second that a GPU of this name does in this precision, as its maker says (dense
// products); nothing where we do not know it.
BONFIRE_API std::optional<double> peak_flops(const std::string& gpu, const std::string& precision);

}  // namespace bonfire
