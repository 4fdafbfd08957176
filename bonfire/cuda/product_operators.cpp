// CUDA's side of the products that bonfire/kernels/product.cpp declares: one call of cuBLASLt each, which adds bias and
// residual or what the output holds already, and writes fp32 from narrower inputs.
#include <optional>

#include <ATen/core/Tensor.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include "bonfire/cuda/matmul.h"

namespace bonfire::cuda {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

bool empty(const Tensor& out, const Tensor& a) { return out.numel() == 0 || a.size(1) == 0; }

Tensor product_cuda(const Tensor& a, const Tensor& b, const OptionalTensor& bias, const OptionalTensor& residual) {
  const c10::cuda::CUDAGuard guard(a.device());
  Tensor out = at::empty({a.size(0), b.size(1)}, a.options());
  const auto fits = [&](const OptionalTensor& x) { return !x || x->scalar_type() == out.scalar_type(); };
  if (!empty(out, a) && fits(bias) && fits(residual) && a.scalar_type() == b.scalar_type() &&
      multiply({.out = out,
                .a = a,
                .b = b,
                .bias = bias ? bias->contiguous() : Tensor(),
                .addend = residual ? residual->contiguous() : Tensor()}))
    return out;
  if (!residual) return bias ? at::addmm(*bias, a, b) : at::mm(a, b);
  const Tensor sum = at::addmm(*residual, a, b);
  return bias ? sum.add(*bias) : sum;
}

void product_into_cuda(Tensor out, const Tensor& a, const Tensor& b, bool accumulate) {
  const c10::cuda::CUDAGuard guard(out.device());
  const bool known = a.scalar_type() == b.scalar_type() &&
                     (out.scalar_type() == a.scalar_type() || (out.scalar_type() == at::kFloat && a.element_size() == 2));
  if (known && !empty(out, a) && multiply({.out = out, .a = a, .b = b, .addend = accumulate ? out : Tensor()})) return;
  if (accumulate)
    out.add_(at::mm(a, b));
  else
    out.copy_(at::mm(a, b));
}

TORCH_LIBRARY_IMPL(bonfire, CUDA, m) {
  m.impl("product", product_cuda);
  m.impl("product_into_", product_into_cuda);
}

}  // namespace
}  // namespace bonfire::cuda
