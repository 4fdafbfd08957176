// CUDA's side of the operators that bonfire/kernels/optimizer.cpp declares.
#include <bit>
#include <optional>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include "bonfire/cuda/optimizer.h"
#include "bonfire/cuda/tensor_memory.h"
#include "bonfire/kernels/optimizer.h"

namespace bonfire::cuda {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// The one element that scales gradients, as the kernels read it. It must outlive the launch only: memory that is freed
// afterwards is reused on the same stream.
Tensor as_double(const OptionalTensor& scale) { return scale ? scale->to(at::kDouble) : Tensor(); }

StepMemory memory_of(const Tensor& p, const Tensor& g, const OptionalTensor& low, const Tensor& scale,
                     const OptionalTensor& numbers) {
  return {.parameters = p.data_ptr(),
          .gradients = g.const_data_ptr(),
          .low_precision = low ? low->data_ptr() : nullptr,
          .scale = scale.defined() ? scale.const_data_ptr<double>() : nullptr,
          .numbers = numbers ? numbers->const_data_ptr() : nullptr,
          .elements = p.numel(),
          .compute = element_of(p),
          .gradient = element_of(g),
          .low = low ? element_of(*low) : Element::f32};
}

static_assert(sizeof(AdamNumbers) == sizeof(StepNumbers) && sizeof(SgdNumbers) == sizeof(StepNumbers));

void adam_cuda(Tensor p, const Tensor& g, Tensor m, Tensor v, const OptionalTensor& top, const OptionalTensor& low,
               const OptionalTensor& scale_tensor, const OptionalTensor& numbers, double lr, double beta1, double beta2,
               double eps, double weight_decay, std::int64_t step, double scale, bool decoupled) {
  if (p.numel() == 0) return;
  const c10::cuda::CUDAGuard guard(p.device());
  const Tensor device_scale = as_double(scale_tensor);
  const auto own = std::bit_cast<AdamNumbers>(numbers_of(AdamStep{.lr = lr,
                                                                  .beta1 = beta1,
                                                                  .beta2 = beta2,
                                                                  .eps = eps,
                                                                  .weight_decay = weight_decay,
                                                                  .step = step,
                                                                  .gradient_scale = scale,
                                                                  .decoupled = decoupled}));
  launch_adam(memory_of(p, g, low, device_scale, numbers), {m.data_ptr(), v.data_ptr(), top ? top->data_ptr() : nullptr},
              own, c10::cuda::getCurrentCUDAStream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

void sgd_cuda(Tensor p, const Tensor& g, const OptionalTensor& buffer, const OptionalTensor& low,
              const OptionalTensor& scale_tensor, const OptionalTensor& numbers, double lr, double momentum,
              double dampening, double weight_decay, std::int64_t step, double scale, bool nesterov) {
  if (p.numel() == 0) return;
  const c10::cuda::CUDAGuard guard(p.device());
  const Tensor device_scale = as_double(scale_tensor);
  const auto own = std::bit_cast<SgdNumbers>(numbers_of(SgdStep{.lr = lr,
                                                                .momentum = momentum,
                                                                .dampening = dampening,
                                                                .weight_decay = weight_decay,
                                                                .step = step,
                                                                .gradient_scale = scale,
                                                                .nesterov = nesterov}));
  launch_sgd(memory_of(p, g, low, device_scale, numbers), buffer ? buffer->data_ptr() : nullptr, own,
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
