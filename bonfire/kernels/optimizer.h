#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include <ATen/core/Tensor.h>

#include "bonfire/base/api.h"

// Optimizer steps, each one pass over flat buffers. All buffers of a call are contiguous and have the same number of
// elements. Parameters and state are of one type, fp32 or fp64; gradients may be any floating type.
namespace bonfire {

struct AdamBuffers {
  at::Tensor parameters;
  at::Tensor gradients;
  at::Tensor exp_avg;
  at::Tensor exp_avg_sq;
  at::Tensor max_exp_avg_sq{};  // given: amsgrad
  at::Tensor low_precision{};   // given: the new parameters are written here as well, rounded
  // Given: one element on the same device that multiplies `AdamStep::gradient_scale`. Not a number: nothing changes.
  at::Tensor gradient_scale{};
  // Given: what numbers_of makes, fp64 on the same device, in place of everything in AdamStep: work that was captured once
  // reads there what is different each time.
  at::Tensor numbers{};
};

struct AdamStep {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0;
  std::int64_t step = 1;      // 1 for the first
  double gradient_scale = 1;  // gradients are multiplied by it first: clipping, unscaling, averaging
  bool decoupled = true;      // AdamW's decay; otherwise Adam's, which adds it to the gradient
  bool maximize = false;
};

BONFIRE_API void adam_(const AdamBuffers& buffers, const AdamStep& step);
// Many at once: one launch on a GPU. REQUIRES: a step for each of the buffers, which are all on one device.
BONFIRE_API void adam_(std::span<const AdamBuffers> buffers, std::span<const AdamStep> steps);

struct SgdBuffers {
  at::Tensor parameters;
  at::Tensor gradients;
  at::Tensor momentum{};  // needed where the momentum is not 0
  at::Tensor low_precision{};
  at::Tensor gradient_scale{};
  at::Tensor numbers{};
};

struct SgdStep {
  double lr = 1e-3;
  double momentum = 0;
  double dampening = 0;
  double weight_decay = 0;
  std::int64_t step = 1;  // at 1 the momentum buffer is written, not read
  double gradient_scale = 1;
  bool nesterov = false;
  bool maximize = false;
};

BONFIRE_API void sgd_(const SgdBuffers& buffers, const SgdStep& step);

// What a step multiplies with, in the order in which kernels read it: all that the operators are given of a step.
inline constexpr std::size_t step_numbers = 8;
using StepNumbers = std::array<double, step_numbers>;
BONFIRE_API StepNumbers numbers_of(const AdamStep& step);
BONFIRE_API StepNumbers numbers_of(const SgdStep& step);

}  // namespace bonfire
