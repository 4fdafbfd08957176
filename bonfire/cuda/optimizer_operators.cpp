// CUDA's side of the operators that bonfire/kernels/optimizer.cpp declares.
#include <cstring>
#include <optional>
#include <vector>

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

// The numbers of one of `steps`, as the kernels read them.
template <class Numbers>
Numbers numbers_at(at::ArrayRef<double> steps, std::size_t at = 0) {
  Numbers numbers;
  std::memcpy(&numbers, steps.slice(at * step_numbers, step_numbers).data(), sizeof(numbers));
  return numbers;
}

void adam_cuda(Tensor p, const Tensor& g, Tensor m, Tensor v, const OptionalTensor& top, const OptionalTensor& low,
               const OptionalTensor& scale_tensor, const OptionalTensor& numbers, at::ArrayRef<double> step) {
  if (p.numel() == 0) return;
  const c10::cuda::CUDAGuard guard(p.device());
  const Tensor device_scale = as_double(scale_tensor);
  const AdamRange range{memory_of(p, g, low, device_scale, numbers),
                        {m.data_ptr(), v.data_ptr(), top ? top->data_ptr() : nullptr},
                        numbers_at<AdamNumbers>(step)};
  launch_adam({range}, c10::cuda::getCurrentCUDAStream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

void adam_all_cuda(at::TensorList p, at::TensorList g, at::TensorList m, at::TensorList v, at::TensorList top,
                   at::TensorList low, at::TensorList scale_tensors, at::TensorList numbers, at::ArrayRef<double> steps) {
  const c10::cuda::CUDAGuard guard(p[0].device());
  std::vector<Tensor> scales;  // as the kernels read them, until they are launched
  std::vector<AdamRange> ranges;
  const auto given = [](at::TensorList all, std::size_t at) {
    return all.empty() || all[at].numel() == 0 ? OptionalTensor() : OptionalTensor(all[at]);
  };
  for (std::size_t at = 0; at < p.size(); ++at) {
    if (p[at].numel() == 0) continue;
    const auto highest = given(top, at);
    scales.push_back(as_double(given(scale_tensors, at)));
    ranges.push_back({memory_of(p[at], g[at], given(low, at), scales.back(), given(numbers, at)),
                      {m[at].data_ptr(), v[at].data_ptr(), highest ? highest->data_ptr() : nullptr},
                      numbers_at<AdamNumbers>(steps, at)});
  }
  launch_adam(ranges, c10::cuda::getCurrentCUDAStream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

void sgd_cuda(Tensor p, const Tensor& g, const OptionalTensor& buffer, const OptionalTensor& low,
              const OptionalTensor& scale_tensor, const OptionalTensor& numbers, at::ArrayRef<double> step) {
  if (p.numel() == 0) return;
  const c10::cuda::CUDAGuard guard(p.device());
  const Tensor device_scale = as_double(scale_tensor);
  launch_sgd(memory_of(p, g, low, device_scale, numbers), buffer ? buffer->data_ptr() : nullptr,
             numbers_at<SgdNumbers>(step), c10::cuda::getCurrentCUDAStream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

Tensor sum_of_squares_cuda(at::TensorList given) {
  const c10::cuda::CUDAGuard guard(given.front().device());
  std::vector<Tensor> dense;  // until they are launched
  std::vector<SquaresRange> ranges;
  for (const Tensor& tensor : given) {
    dense.push_back(tensor.contiguous());
    ranges.push_back({dense.back().const_data_ptr(), element_of(tensor), tensor.numel()});
  }
  const auto options = given.front().options().dtype(at::kDouble);
  const Tensor scratch = at::empty({sum_of_squares_scratch(ranges)}, options), result = at::empty({}, options);
  launch_sum_of_squares(ranges, scratch.data_ptr<double>(), result.data_ptr<double>(), c10::cuda::getCurrentCUDAStream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return result;
}

TORCH_LIBRARY_IMPL(bonfire, CUDA, m) {
  m.impl("adam_", adam_cuda);
  m.impl("adam_all_", adam_all_cuda);
  m.impl("sgd_", sgd_cuda);
  m.impl("sum_of_squares", sum_of_squares_cuda);
}

}  // namespace
}  // namespace bonfire::cuda
