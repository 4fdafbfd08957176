#pragma once

#include <cstdint>

#include "bonfire/cuda/element.h"

namespace bonfire::cuda {

struct CrossEntropyMemory {
  void* logits = nullptr;                // [rows, classes], contiguous
  const std::int64_t* target = nullptr;  // [rows]
  double* losses = nullptr;              // [rows]: 0 where the target is `ignore`, not a number where it is no class
  std::int64_t rows = 0, classes = 0, ignore = -100;
  Element type = Element::f32;
  bool gradient = false;  // softmax minus one-hot replaces the logits; zeros where the target is ignored
};
void launch_cross_entropy(const CrossEntropyMemory& memory, cudaStream_t stream);
// The same with the gradient, for rows of two-byte elements that fit into a few multiprocessors: false where they do not, or
// where the GPU lacks what it takes.
bool launch_streamed_cross_entropy(const CrossEntropyMemory& memory, cudaStream_t stream);

}  // namespace bonfire::cuda
