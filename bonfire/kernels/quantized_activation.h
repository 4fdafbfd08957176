#pragma once

#include <ATen/core/Tensor.h>

#include "bonfire/base/api.h"
#include "bonfire/kernels/fp8.h"

// SwiGLU whose results are rounded to eight bits by the kernel that makes them, where their scales are known beforehand. The
// bits are those of making them first and rounding them afterwards.
namespace bonfire {

// Of wide [rows, 2 columns]; transposed as well where asked for.
BONFIRE_API Quantized quantized_swiglu(const at::Tensor& wide, const KnownScale& scale, bool transposed);

struct QuantizedSwigluBackward {
  Quantized activated;  // transposed, where its scale was given
  Quantized d_wide;     // both ways
};
struct QuantizedSwigluScales {
  KnownScale activated{};  // without a history: it is not made again
  KnownScale gradient{};
};
BONFIRE_API QuantizedSwigluBackward quantized_swiglu_backward(const at::Tensor& d_activated, const at::Tensor& wide,
                                                              const QuantizedSwigluScales& scales);

}  // namespace bonfire
