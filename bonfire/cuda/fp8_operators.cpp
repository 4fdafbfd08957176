// CUDA's side of what bonfire/kernels/fp8.cpp declares.
#include <optional>
#include <tuple>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include "bonfire/base/error.h"
#include "bonfire/cuda/matmul.h"
#include "bonfire/cuda/quantize.h"
#include "bonfire/cuda/tensor_memory.h"

namespace bonfire::cuda {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

at::ScalarType eight_bits(bool wide_range) { return wide_range ? at::kFloat8_e5m2 : at::kFloat8_e4m3fn; }

void require_quantizable(const Tensor& x, std::int64_t multiple) {
  require(x.dim() == 2 && x.is_contiguous() && x.element_size() == 2 && x.size(0) % multiple == 0 && x.size(1) % 16 == 0 &&
              reinterpret_cast<std::uintptr_t>(x.const_data_ptr()) % 16 == 0,
          "fp8: {} rows of {}, {}; allowed: bf16 or fp16, contiguous, in multiples of 16", x.size(0), x.size(-1),
          c10::toString(x.scalar_type()));
}

QuantizeMemory memory_of(const Tensor& x, bool wide_range) {
  return {.x = x.const_data_ptr(), .rows = x.size(0), .columns = x.size(1), .type = element_of(x), .wide_range = wide_range};
}

std::tuple<Tensor, Tensor, Tensor> quantize_cuda(const Tensor& x, Tensor history, const OptionalTensor& later,
                                                 std::int64_t position, bool measure, bool wide_range, bool values,
                                                 bool transposed) {
  require_quantizable(x, 16);
  const c10::cuda::CUDAGuard guard(x.device());
  const auto stream = c10::cuda::getCurrentCUDAStream();
  const auto options = x.options().dtype(eight_bits(wide_range));
  const Tensor straight = at::empty({values ? x.size(0) : 0, values ? x.size(1) : 0}, options);
  const Tensor turned = at::empty({transposed ? x.size(1) : 0, transposed ? x.size(0) : 0}, options);
  const Tensor inverse = at::empty({1}, x.options().dtype(at::kFloat));
  Tensor measured;
  QuantizeMemory memory = memory_of(x, wide_range);
  memory.values = values ? straight.data_ptr() : nullptr;
  memory.transposed = transposed ? turned.data_ptr() : nullptr;
  memory.inverse = inverse.data_ptr<float>();
  memory.history = history.data_ptr<float>();
  memory.length = static_cast<int>(history.numel());
  memory.now = static_cast<int>(position % history.numel());
  memory.next = static_cast<int>((position + 1) % history.numel());
  memory.later = later ? later->const_data_ptr<std::int64_t>() : nullptr;
  if (measure) {
    measured = at::empty({1}, inverse.options());
    memory.measured = measured.data_ptr<float>();
    launch_magnitude(memory, stream);
  }
  launch_quantize(memory, stream);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return {straight, turned, inverse};
}

std::tuple<Tensor, Tensor> quantize_rows_cuda(const Tensor& x, bool wide_range) {
  require_quantizable(x, 1);
  const c10::cuda::CUDAGuard guard(x.device());
  const Tensor values = at::empty(x.sizes(), x.options().dtype(eight_bits(wide_range)));
  const Tensor inverse = at::empty({x.size(0)}, x.options().dtype(at::kFloat));
  QuantizeMemory memory = memory_of(x, wide_range);
  memory.values = values.data_ptr();
  memory.inverse = inverse.data_ptr<float>();
  launch_quantize_rows(memory, c10::cuda::getCurrentCUDAStream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return {values, inverse};
}

void fp8_product_cuda(Tensor out, const Tensor& a, const Tensor& b, const Tensor& inverse_a, const Tensor& inverse_b,
                      const OptionalTensor& bias, const OptionalTensor& addend, bool short_sums) {
  const c10::cuda::CUDAGuard guard(out.device());
  // With a scale for each row, the sum is made in fp32 and rounded once before anything is added.
  const bool by_row = inverse_a.numel() > 1;
  require(multiply({.out = out,
                    .a = a,
                    .b = b,
                    .bias = bias && !by_row ? bias->contiguous() : Tensor(),
                    .addend = addend && !by_row ? addend->contiguous() : Tensor(),
                    .scale_a = inverse_a,
                    .scale_b = inverse_b,
                    .short_sums = short_sums}),
          "cuBLASLt makes no product of {} and {} in fp8 on this GPU; allowed: a GPU of compute capability 8.9 or more",
          c10::toString(a.scalar_type()), c10::toString(b.scalar_type()));
  if (by_row && bias) out.add_(*bias);
  if (by_row && addend) out.add_(*addend);
}

TORCH_LIBRARY_IMPL(bonfire, CUDA, m) {
  m.impl("fp8_quantize", quantize_cuda);
  m.impl("fp8_quantize_rows", quantize_rows_cuda);
  m.impl("fp8_product_", fp8_product_cuda);
}

}  // namespace
}  // namespace bonfire::cuda
