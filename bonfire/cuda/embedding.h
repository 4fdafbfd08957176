#pragma once

#include <cstdint>

#include "bonfire/cuda/element.h"

namespace bonfire::cuda {

// Adds row order[i] of `gradient` [rows, columns] to row tokens[i] of `out`, for all i. `tokens` is sorted and `order` says
// where each of them came from; equal tokens keep their order, so that every row is summed in one order, which the tokens
// alone decide.
struct EmbeddingMemory {
  void* out = nullptr;
  const void* gradient = nullptr;
  const std::int64_t* tokens = nullptr;
  const std::int64_t* order = nullptr;
  void* parts = nullptr;  // scratch: embedding_parts rows of `columns` sums: f64 where `out` is, otherwise f32
  std::int64_t rows = 0, columns = 0;
  Element type = Element::f32;      // of the gradient
  Element out_type = Element::f32;  // the same, or f32
};
std::int64_t embedding_parts(std::int64_t rows);
void launch_embedding_add(const EmbeddingMemory& memory, cudaStream_t stream);

}  // namespace bonfire::cuda
