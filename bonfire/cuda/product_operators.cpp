// CUDA's side of the products that bonfire/kernels declares: one call of cuBLASLt each, which adds bias and residual or what
// the output holds already, and writes fp32 from narrower inputs; with an activation at their edge, one kernel of ours.
#include <cstdint>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include "bonfire/cuda/activated_product.h"
#include "bonfire/cuda/matmul.h"

namespace bonfire::cuda {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using Tensors = std::vector<Tensor>;  // none: no kernel of ours takes what was given

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
  // The sum is not rounded to a narrower type on its way.
  const Tensor left = a.to(out.scalar_type()), right = b.to(out.scalar_type());
  if (accumulate)
    out.add_(at::mm(left, right));
  else
    out.copy_(at::mm(left, right));
}

// As the copies of tiles need it: bf16 by rows, beginning at a multiple of 16 bytes.
bool suits_copies(const Tensor& x) {
  return x.scalar_type() == at::kBFloat16 && x.is_contiguous() &&
         reinterpret_cast<std::uintptr_t>(x.const_data_ptr()) % 16 == 0;
}

Edge edge_of(bool gated) { return gated ? Edge::swiglu : Edge::gelu; }

Tensors activated_product_cuda(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, bool gated) {
  const c10::cuda::CUDAGuard guard(x.device());
  const std::int64_t rows = x.size(0), columns = weight.size(0) / (gated ? 2 : 1);
  if (!suits_copies(x) || !suits_copies(weight) || (bias && (gated || !suits_copies(*bias))) ||
      !suits_hopper({.edge = edge_of(gated), .rows = rows, .columns = columns, .inner = x.size(1)}))
    return {};
  Tensor wide = at::empty({rows, weight.size(0)}, x.options()), active = at::empty({rows, columns}, x.options());
  launch_activated_product({.edge = edge_of(gated),
                            .x = x.const_data_ptr(),
                            .weight = weight.const_data_ptr(),
                            .bias = bias ? bias->const_data_ptr() : nullptr,
                            .wide = wide.data_ptr(),
                            .active = active.data_ptr(),
                            .rows = rows,
                            .columns = columns,
                            .inner = x.size(1)},
                           c10::cuda::getCurrentCUDAStream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return {wide, active};
}

Tensors activated_product_backward_cuda(const Tensor& dy, const Tensor& weight, const Tensor& wide, bool gated, bool again) {
  const c10::cuda::CUDAGuard guard(dy.device());
  const std::int64_t rows = dy.size(0), columns = weight.size(1);
  if (!suits_copies(dy) || !suits_copies(weight) || !suits_copies(wide) ||
      !suits_hopper({.edge = edge_of(gated), .rows = rows, .columns = columns, .inner = dy.size(1)}))
    return {};
  const auto numbers = dy.options().dtype(at::kFloat);
  Tensor d_wide = at::empty(wide.sizes(), wide.options());
  Tensor active = again ? at::empty({rows, columns}, dy.options()) : at::empty({0}, dy.options());
  Tensor sums = at::empty({gated ? 0 : columns}, numbers), parts;
  if (!gated) parts = at::empty({sum_parts_of(rows), columns}, numbers);
  launch_activation_gradient({.edge = edge_of(gated),
                              .dy = dy.const_data_ptr(),
                              .weight = weight.const_data_ptr(),
                              .wide = wide.const_data_ptr(),
                              .d_wide = d_wide.data_ptr(),
                              .active = again ? active.data_ptr() : nullptr,
                              .sums = gated ? nullptr : sums.data_ptr<float>(),
                              .parts = gated ? nullptr : parts.data_ptr<float>(),
                              .rows = rows,
                              .columns = columns,
                              .inner = dy.size(1)},
                             c10::cuda::getCurrentCUDAStream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return {d_wide, active, sums};
}

TORCH_LIBRARY_IMPL(bonfire, CUDA, m) {
  m.impl("activated_product", activated_product_cuda);
  m.impl("activated_product_backward", activated_product_backward_cuda);
  m.impl("product", product_cuda);
  m.impl("product_into_", product_into_cuda);
}

}  // namespace
}  // namespace bonfire::cuda
