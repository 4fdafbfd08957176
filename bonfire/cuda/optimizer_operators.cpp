// CUDA's side of the operators that bonfire/kernels/optimizer.cpp declares.
#include <cmath>
#include <optional>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include "bonfire/cuda/optimizer.h"
#include "bonfire/cuda/tensor_memory.h"

namespace bonfire::cuda {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// The one element that scales gradients, as the kernels read it. It must outlive the launch only: memory that is freed
// afterwards is reused on the same stream.
Tensor as_double(const OptionalTensor& scale) { return scale ? scale->to(at::kDouble) : Tensor(); }

StepMemory memory_of(const Tensor& p, const Tensor& g, const OptionalTensor& low, const Tensor& scale) {
  return {.parameters = p.data_ptr(),
          .gradients = g.const_data_ptr(),
          .low_precision = low ? low->data_ptr() : nullptr,
          .scale = scale.defined() ? scale.const_data_ptr<double>() : nullptr,
          .elements = p.numel(),
          .compute = element_of(p),
          .gradient = element_of(g),
          .low = low ? element_of(*low) : Element::f32};
}

void adam_cuda(Tensor p, const Tensor& g, Tensor m, Tensor v, const OptionalTensor& top, const OptionalTensor& low,
               const OptionalTensor& scale_tensor, double lr, double beta1, double beta2, double eps, double weight_decay,
               std::int64_t step, double scale, bool decoupled) {
  if (p.numel() == 0) return;
  const c10::cuda::CUDAGuard guard(p.device());
  const Tensor device_scale = as_double(scale_tensor);
  const AdamNumbers numbers{.scale = scale,
                            .decay = decoupled ? 0 : weight_decay,
                            .keep = decoupled ? 1 - lr * weight_decay : 1,
                            .beta1 = beta1,
                            .beta2 = beta2,
                            .step_size = lr / (1 - std::pow(beta1, static_cast<double>(step))),
                            .root_correction = std::sqrt(1 - std::pow(beta2, static_cast<double>(step))),
                            .eps = eps};
  launch_adam(memory_of(p, g, low, device_scale), {m.data_ptr(), v.data_ptr(), top ? top->data_ptr() : nullptr}, numbers,
              c10::cuda::getCurrentCUDAStream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

void sgd_cuda(Tensor p, const Tensor& g, const OptionalTensor& buffer, const OptionalTensor& low,
              const OptionalTensor& scale_tensor, double lr, double momentum, double dampening, double weight_decay,
              std::int64_t step, double scale, bool nesterov) {
  if (p.numel() == 0) return;
  const c10::cuda::CUDAGuard guard(p.device());
  const Tensor device_scale = as_double(scale_tensor);
  const bool first = step == 1;
  const SgdNumbers numbers{.scale = scale,
                           .decay = weight_decay,
                           .lr = lr,
                           .old_momentum = first ? 0 : momentum,
                           .fresh = first ? 1 : 1 - dampening,
                           .ahead = nesterov ? 1.0 : 0.0,
                           .weight = nesterov ? momentum : 1};
  launch_sgd(memory_of(p, g, low, device_scale), buffer ? buffer->data_ptr() : nullptr, numbers,
             c10::cuda::getCurrentCUDAStream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

Tensor sum_of_squares_cuda(const Tensor& given) {
  const c10::cuda::CUDAGuard guard(given.device());
  const Tensor x = given.contiguous();
  const auto options = x.options().dtype(at::kDouble);
  const Tensor scratch = at::empty({sum_of_squares_scratch}, options), result = at::empty({}, options);
  launch_sum_of_squares(x.const_data_ptr(), element_of(x), x.numel(), scratch.data_ptr<double>(), result.data_ptr<double>(),
                        c10::cuda::getCurrentCUDAStream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return result;
}

TORCH_LIBRARY_IMPL(bonfire, CUDA, m) {
  m.impl("adam_", adam_cuda);
  m.impl("sgd_", sgd_cuda);
  m.impl("sum_of_squares", sum_of_squares_cuda);
}

}  // namespace
}  // namespace bonfire::cuda
