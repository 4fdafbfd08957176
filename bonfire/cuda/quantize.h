#pragma once

#include <cstdint>

#include "bonfire/cuda/element.h"

namespace bonfire::cuda {

// [rows, columns], contiguous, both multiples of 16, bf16 or f16, to eight bits: e5m2 where `wide_range`, otherwise e4m3.
struct QuantizeMemory {
  const void* x = nullptr;
  void* values = nullptr;      // [rows, columns], or null
  void* transposed = nullptr;  // [columns, rows], or null
  float* inverse = nullptr;    // what the elements are to be multiplied by: 1, or one for each row
  // Elements are scaled by the largest of these but two, one of which gets their own largest magnitude, and the other zero.
  float* history = nullptr;
  int length = 0, now = 0, next = 0;
  const std::int64_t* later = nullptr;  // or null: how many places behind those two the two are
  float* measured = nullptr;            // instead, by this one, which launch_magnitude has made
  std::int64_t rows = 0, columns = 0;
  Element type = Element::bf16;
  bool wide_range = false;
};
void launch_quantize(const QuantizeMemory& memory, cudaStream_t stream);
// Every row by its own largest magnitude; only `x`, `values` and `inverse` of the memory are used.
void launch_quantize_rows(const QuantizeMemory& memory, cudaStream_t stream);
// The largest magnitude of `x` to `measured`.
void launch_magnitude(const QuantizeMemory& memory, cudaStream_t stream);

}  // namespace bonfire::cuda
