#pragma once

#include <cstdint>

#include "bonfire/cuda/element.h"
#include "bonfire/cuda/qkv.h"

namespace bonfire::cuda {

// Passes over [rows, columns], contiguous (only launch_column_sums knows gaps between rows), that also sum over the rows.
// Sums are f64 for f64 elements, otherwise f32.
struct ColumnsMemory {
  const void* x = nullptr;
  void* d_out = nullptr;  // of gelu's backward: the gradient of gelu(x), which gelu(x) replaces where `again`
  bool again = false;
  void* result = nullptr;  // of gelu's backward: the gradient of x, which is what is summed; otherwise x is
  void* sums = nullptr;    // [columns]
  void* parts = nullptr;   // scratch: most_column_parts rows of `columns` sums
  std::int64_t rows = 0, columns = 0;
  std::int64_t stride = 0;  // from row to row of x
  Element type = Element::f32;
};
std::int64_t most_column_parts(std::int64_t rows, std::int64_t columns);
void launch_column_sums(const ColumnsMemory& memory, cudaStream_t stream);
void launch_gelu_backward_sums(const ColumnsMemory& memory, cudaStream_t stream);
// launch_merge_qkv where nothing turns, summing what it packs: `rows`, `columns` and `type` are those of the packed tensor.
void launch_merge_qkv_sums(const QkvMemory& qkv, const ColumnsMemory& memory, cudaStream_t stream);

}  // namespace bonfire::cuda
