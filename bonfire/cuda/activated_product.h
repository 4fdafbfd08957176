#pragma once

#include <cstdint>

#include <cuda_runtime_api.h>

// Products of bf16 matrices with an activation at their edge, on Hopper: what the activation reads or writes passes through
// registers while it is there anyway, instead of through memory once more. All matrices lie by rows and begin at multiples
// of 16 bytes.
namespace bonfire::cuda {

enum class Edge { swiglu, gelu };

// wide = x weight^T (+ bias), active = activation(wide), for x [rows, inner].
//   swiglu: weight [2 columns, inner], wide [rows, 2 columns], gates first; gelu: weight [columns, inner], wide [rows,
//   columns].
struct ActivatedProduct {
  Edge edge = Edge::swiglu;
  const void *x = nullptr, *weight = nullptr;
  const void* bias = nullptr;  // of gelu only; [columns], bf16
  void *wide = nullptr, *active = nullptr;
  std::int64_t rows = 0, columns = 0, inner = 0;
};

// d_wide = activation'(wide) (dy weight) for dy [rows, inner] and weight [inner, columns].
struct ActivationGradientProduct {
  Edge edge = Edge::swiglu;
  const void *dy = nullptr, *weight = nullptr, *wide = nullptr;
  void* d_wide = nullptr;
  void* active = nullptr;  // null, or where the activation is made again
  float* sums = nullptr;   // of gelu only: [columns], of d_wide over the rows
  float* parts = nullptr;  // scratch for them: sum_parts_of(rows) times columns
  std::int64_t rows = 0, columns = 0, inner = 0;
};
std::int64_t sum_parts_of(std::int64_t rows);

// Whether this GPU has the kernels, they take such matrices, and these have tiles enough for all of its multiprocessors.
struct EdgeShape {
  Edge edge = Edge::swiglu;
  std::int64_t rows = 0, columns = 0, inner = 0;
};
bool suits_hopper(const EdgeShape& shape);

// Stream: the given one. Nothing is synchronised; may be captured.
void launch_activated_product(const ActivatedProduct& product, cudaStream_t stream);
void launch_activation_gradient(const ActivationGradientProduct& product, cudaStream_t stream);

}  // namespace bonfire::cuda
