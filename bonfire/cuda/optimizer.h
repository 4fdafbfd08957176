#pragma once

#include <cstdint>
#include <vector>

#include "bonfire/cuda/element.h"

namespace bonfire::cuda {

// What the launchers of optimizer steps get: device memory, as bonfire/kernels/optimizer.h describes it. `compute` is the
// type of parameters and state, f32 or f64.
struct StepMemory {
  void* parameters = nullptr;
  const void* gradients = nullptr;
  void* low_precision = nullptr;  // or null
  const double* scale = nullptr;  // or null: one element that multiplies the gradient's scale; not a number: no step
  // Or null: an AdamNumbers or SgdNumbers that is read instead of the one that is given.
  const void* numbers = nullptr;
  std::int64_t elements = 0;
  Element compute = Element::f32;
  Element gradient = Element::f32;
  Element low = Element::bf16;
};

struct AdamMemory {
  void* exp_avg = nullptr;
  void* exp_avg_sq = nullptr;
  void* max_exp_avg_sq = nullptr;  // or null
};

// As numbers_of of bonfire/kernels/optimizer.h makes them, in its order.
struct AdamNumbers {
  double scale, decay, keep, beta1, beta2, step_size, root_correction, eps;
};

struct SgdNumbers {
  double scale, decay, lr;
  double old_momentum, fresh;  // the new momentum is old_momentum times the old one and fresh times the gradient
  double ahead, weight;        // the direction is ahead times the gradient and weight times the new momentum
  double unused;
};

struct AdamRange {
  StepMemory memory{};
  AdamMemory state{};
  AdamNumbers numbers{};
};
// All of them in one launch, as far as they are of the same types.
void launch_adam(const std::vector<AdamRange>& ranges, cudaStream_t stream);
// `momentum` may be null.
void launch_sgd(const StepMemory& memory, void* momentum, const SgdNumbers& numbers, cudaStream_t stream);

struct SquaresRange {
  const void* data = nullptr;
  Element type = Element::f32;
  std::int64_t elements = 0;
};
// Elements of `scratch` that launch_sum_of_squares needs.
std::int64_t sum_of_squares_scratch(const std::vector<SquaresRange>& ranges);
// Of all of them, in one launch as far as they are of the same type, and one that adds up. In an order that depends on
// nothing but types, numbers of elements and whether they are aligned to 16 bytes.
void launch_sum_of_squares(const std::vector<SquaresRange>& ranges, double* scratch, double* result, cudaStream_t stream);

}  // namespace bonfire::cuda
