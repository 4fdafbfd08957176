#pragma once

#include <ATen/core/Tensor.h>

#include "bonfire/base/error.h"
#include "bonfire/cuda/element.h"

namespace bonfire::cuda {

inline Element element_of(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat: return Element::f32;
    case at::kDouble: return Element::f64;
    case at::kBFloat16: return Element::bf16;
    case at::kHalf: return Element::f16;
    default: fail("kernels know fp32, fp64, bf16 and fp16, not {}", c10::toString(tensor.scalar_type()));
  }
}

// The type of sums and statistics over elements of this one.
inline at::ScalarType wide_type(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

}  // namespace bonfire::cuda
