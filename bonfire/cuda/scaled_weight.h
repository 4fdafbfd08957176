#pragma once

#include <cstdint>

#include <cuda_runtime_api.h>

namespace bonfire::cuda {

// Elements [first, first + length) of a fp32 weight, each `each` of which share a scale; all multiples of 4, and aligned to
// 16 bytes.
struct WeightPartMemory {
  const float* x = nullptr;
  std::int64_t length = 0, first = 0, each = 0;
  float* magnitudes = nullptr;  // of the whole weight
  void* out = nullptr;          // e4m3
};
// Raises those of the magnitudes that are smaller.
void launch_note_magnitudes(const WeightPartMemory& memory, cudaStream_t stream);
// x, scaled by the magnitudes, to `out`.
void launch_round_scaled(const WeightPartMemory& memory, cudaStream_t stream);

// [rows, columns] bytes, both multiples of 16, to [columns, rows].
struct TransposeMemory {
  const void* x = nullptr;
  void* out = nullptr;
  std::int64_t rows = 0, columns = 0;
};
void launch_transpose(const TransposeMemory& memory, cudaStream_t stream);

}  // namespace bonfire::cuda
