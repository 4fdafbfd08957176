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
#include "bonfire/cuda/quantized_activation.h"
#include "bonfire/cuda/scaled_weight.h"
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

DelayedMemory delayed_in(const Tensor& history, const OptionalTensor& later, std::int64_t position) {
  return {.history = history.data_ptr<float>(),
          .length = static_cast<int>(history.numel()),
          .now = static_cast<int>(position % history.numel()),
          .next = static_cast<int>((position + 1) % history.numel()),
          .later = later ? later->const_data_ptr<std::int64_t>() : nullptr};
}

QuantizedSwigluMemory swiglu_memory(const Tensor& gate_up) {
  require_quantizable(gate_up, 16);
  require(gate_up.size(1) % 32 == 0, "fp8: a swiglu of {} columns; allowed: multiples of 16", gate_up.size(1) / 2);
  return {.gate_up = gate_up.const_data_ptr(),
          .rows = gate_up.size(0),
          .columns = gate_up.size(1) / 2,
          .type = element_of(gate_up)};
}

std::tuple<Tensor, Tensor, Tensor> quantized_swiglu_cuda(const Tensor& gate_up, Tensor history, const OptionalTensor& later,
                                                         std::int64_t position, bool transposed) {
  const c10::cuda::CUDAGuard guard(gate_up.device());
  auto memory = swiglu_memory(gate_up);
  const auto options = gate_up.options().dtype(eight_bits(false));
  const Tensor values = at::empty({memory.rows, memory.columns}, options);
  const Tensor turned = at::empty({transposed ? memory.columns : 0, transposed ? memory.rows : 0}, options);
  const Tensor inverse = at::empty({1}, gate_up.options().dtype(at::kFloat));
  memory.activated = delayed_in(history, later, position);
  memory.activated.values = values.data_ptr();
  memory.activated.transposed = transposed ? turned.data_ptr() : nullptr;
  memory.activated.inverse = inverse.data_ptr<float>();
  launch_quantized_swiglu(memory, c10::cuda::getCurrentCUDAStream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return {values, turned, inverse};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> quantized_swiglu_backward_cuda(
    const Tensor& d_out, const Tensor& gate_up, OptionalTensor history, const OptionalTensor& later, std::int64_t position,
    Tensor gradient_history, const OptionalTensor& gradient_later, std::int64_t gradient_position) {
  const c10::cuda::CUDAGuard guard(gate_up.device());
  auto memory = swiglu_memory(gate_up);
  require_quantizable(d_out, 16);
  memory.d_out = d_out.const_data_ptr();
  const auto narrow = gate_up.options().dtype(eight_bits(false)), wide_range = gate_up.options().dtype(eight_bits(true));
  const auto scale = gate_up.options().dtype(at::kFloat);
  const Tensor again = at::empty({history ? memory.columns : 0, history ? memory.rows : 0}, narrow);
  const Tensor values = at::empty({memory.rows, 2 * memory.columns}, wide_range);
  const Tensor turned = at::empty({2 * memory.columns, memory.rows}, wide_range);
  const Tensor inverse_again = at::empty({1}, scale), inverse = at::empty({1}, scale);
  if (history) {
    memory.activated = delayed_in(*history, later, position);
    memory.activated.transposed = again.data_ptr();
    memory.activated.inverse = inverse_again.data_ptr<float>();
  }
  memory.d_gate_up = delayed_in(gradient_history, gradient_later, gradient_position);
  memory.d_gate_up.values = values.data_ptr();
  memory.d_gate_up.transposed = turned.data_ptr();
  memory.d_gate_up.inverse = inverse.data_ptr<float>();
  launch_quantized_swiglu_backward(memory, c10::cuda::getCurrentCUDAStream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return {again, inverse_again, values, turned, inverse};
}

WeightPartMemory part_of(const Tensor& x, const Tensor& magnitudes, std::int64_t first, std::int64_t each) {
  require(x.scalar_type() == at::kFloat && x.is_contiguous() && x.numel() % 4 == 0 && first % 4 == 0 && each % 4 == 0 &&
              reinterpret_cast<std::uintptr_t>(x.const_data_ptr()) % 16 == 0,
          "fp8: {} elements from {} of a weight with {} to a scale, {}; allowed: fp32 in multiples of 4", x.numel(), first,
          each, c10::toString(x.scalar_type()));
  return {.x = x.const_data_ptr<float>(),
          .length = x.numel(),
          .first = first,
          .each = each,
          .magnitudes = magnitudes.data_ptr<float>()};
}

void note_magnitudes_cuda(Tensor magnitudes, const Tensor& x, std::int64_t first, std::int64_t each) {
  const c10::cuda::CUDAGuard guard(x.device());
  launch_note_magnitudes(part_of(x, magnitudes, first, each), c10::cuda::getCurrentCUDAStream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

void round_scaled_cuda(Tensor out, const Tensor& x, const Tensor& magnitudes, std::int64_t first, std::int64_t each) {
  const c10::cuda::CUDAGuard guard(x.device());
  auto memory = part_of(x, magnitudes, first, each);
  memory.out = out.data_ptr();
  launch_round_scaled(memory, c10::cuda::getCurrentCUDAStream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

Tensor transposed_cuda(const Tensor& x) {
  require(x.dim() == 2 && x.is_contiguous() && x.element_size() == 1 && x.size(0) % 16 == 0 && x.size(1) % 16 == 0 &&
              reinterpret_cast<std::uintptr_t>(x.const_data_ptr()) % 16 == 0,
          "fp8: a weight of {} rows of {}, {}; allowed: eight bits, contiguous, in multiples of 16", x.size(0), x.size(-1),
          c10::toString(x.scalar_type()));
  const c10::cuda::CUDAGuard guard(x.device());
  const Tensor out = at::empty({x.size(1), x.size(0)}, x.options());
  launch_transpose({.x = x.const_data_ptr(), .out = out.data_ptr(), .rows = x.size(0), .columns = x.size(1)},
                   c10::cuda::getCurrentCUDAStream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return out;
}

TORCH_LIBRARY_IMPL(bonfire, CUDA, m) {
  m.impl("fp8_quantize", quantize_cuda);
  m.impl("fp8_quantize_rows", quantize_rows_cuda);
  m.impl("fp8_swiglu", quantized_swiglu_cuda);
  m.impl("fp8_swiglu_backward", quantized_swiglu_backward_cuda);
  m.impl("fp8_note_magnitudes_", note_magnitudes_cuda);
  m.impl("fp8_round_", round_scaled_cuda);
  m.impl("fp8_transposed", transposed_cuda);
  m.impl("fp8_product_", fp8_product_cuda);
}

}  // namespace
}  // namespace bonfire::cuda
