#pragma once

#include <cstdint>

#include "bonfire/cuda/element.h"

namespace bonfire::cuda {

// RMSNorm, or LayerNorm where `centered`, over rows of `columns` elements. All contiguous. Statistics and the gradients of
// weight and bias are f64 for f64 elements, otherwise f32; weight and bias are of the elements' type or of the statistics'.
struct NormShape {
  std::int64_t rows = 0, columns = 0;
  Element type = Element::f32;
  Element weight_type = Element::f32;
  bool centered = false;
};

struct NormForward {
  const void* x = nullptr;
  const void* residual = nullptr;  // or null; then `sum` gets x + residual, and the norm is of that
  const void* weight = nullptr;
  const void* bias = nullptr;  // centered only
  void* sum = nullptr;
  void* normed = nullptr;
  void* mean = nullptr;  // centered only
  void* rstd = nullptr;
  double eps = 0;
};
void launch_norm(const NormShape& shape, const NormForward& memory, cudaStream_t stream);

struct NormBackward {
  const void* d_normed = nullptr;
  const void* d_stream = nullptr;  // or null; is added to dx
  const void* x = nullptr;
  const void* weight = nullptr;
  const void* mean = nullptr;  // centered only
  const void* rstd = nullptr;
  const void* bias = nullptr;  // centered only, and only for `normed`
  void* dx = nullptr;
  void* normed = nullptr;  // or null; the norm again, with forward's bits
  void* d_weight = nullptr;
  void* d_bias = nullptr;   // centered only
  void* dx_sums = nullptr;  // centered only, or null; of dx over the rows
  void* parts = nullptr;    // scratch: norm_parts rows of `columns` statistics for each of the three before that is there
};
// The sums over rows are made of this many parts; it depends on nothing but the shape, so equal runs give equal bits.
std::int64_t norm_parts(const NormShape& shape);
void launch_norm_backward(const NormShape& shape, const NormBackward& memory, cudaStream_t stream);

}  // namespace bonfire::cuda
