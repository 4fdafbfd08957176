#pragma once

#include <cstdint>

#include "bonfire/cuda/element.h"

namespace bonfire::cuda {

// `gate_up` is [rows, 2 columns], gates first; `out` and `d_out` are [rows, columns]. All contiguous.
struct SwigluMemory {
  const void* gate_up = nullptr;
  const void* d_out = nullptr;  // backward only
  void* result = nullptr;       // forward: out; backward: the gradient of gate_up
  bool again = false;           // backward only: leave `out` in place of its gradient
  std::int64_t rows = 0, columns = 0;
  Element type = Element::f32;
};
void launch_swiglu(const SwigluMemory& memory, cudaStream_t stream);
void launch_swiglu_backward(const SwigluMemory& memory, cudaStream_t stream);

struct GeluMemory {
  const void* x = nullptr;
  const void* d_out = nullptr;  // backward only
  void* result = nullptr;
  std::int64_t elements = 0;
  Element type = Element::f32;
};
void launch_gelu(const GeluMemory& memory, cudaStream_t stream);
void launch_gelu_backward(const GeluMemory& memory, cudaStream_t stream);

// `out`, which may be x, is x times *factor: f64 for f64 elements, otherwise f32.
struct ScaledMemory {
  const void* x = nullptr;
  void* out = nullptr;
  const void* factor = nullptr;
  std::int64_t elements = 0;
  Element type = Element::f32;
};
void launch_scaled(const ScaledMemory& memory, cudaStream_t stream);

// Element i of x becomes 0 where word (first + i) of the generator is below p * 2^32, otherwise it grows by 1 / (1 - p).
struct DropoutMemory {
  const void* x = nullptr;
  void* out = nullptr;
  std::int64_t elements = 0;
  Element type = Element::f32;
  double p = 0;
  std::uint64_t key = 0, first = 0;
};
void launch_dropout(const DropoutMemory& memory, cudaStream_t stream);

}  // namespace bonfire::cuda
