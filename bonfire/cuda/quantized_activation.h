#pragma once

#include <cstdint>

#include "bonfire/cuda/element.h"

namespace bonfire::cuda {

// Eight bits that are scaled by the largest of a history of magnitudes but two, one of which gets their own largest, and the
// other zero: see QuantizeMemory.
struct DelayedMemory {
  void* values = nullptr;      // [rows, columns], or null
  void* transposed = nullptr;  // [columns, rows], or null
  float* inverse = nullptr;
  float* history = nullptr;
  int length = 0, now = 0, next = 0;
  const std::int64_t* later = nullptr;
};

// SwiGLU of [rows, 2 columns], gates before ups, bf16 or f16; both multiples of 16, and aligned to 16 bytes. Results are
// rounded to that type and then to eight bits, as two kernels one after the other would.
struct QuantizedSwigluMemory {
  const void* gate_up = nullptr;
  const void* d_out = nullptr;  // [rows, columns]; null: forward alone
  DelayedMemory activated{};    // e4m3 [rows, columns]; forward writes both, backward the transpose alone
  DelayedMemory d_gate_up{};    // e5m2 [rows, 2 columns]
  std::int64_t rows = 0, columns = 0;
  Element type = Element::bf16;
};
void launch_quantized_swiglu(const QuantizedSwigluMemory& memory, cudaStream_t stream);
void launch_quantized_swiglu_backward(const QuantizedSwigluMemory& memory, cudaStream_t stream);

}  // namespace bonfire::cuda
