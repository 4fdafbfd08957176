#pragma once

#include <cstdint>

#include "bonfire/cuda/element.h"

namespace bonfire::cuda {

// One of q, k and v: [batch, heads, sequence, head_dim] with any strides but the last, which is 1.
struct HeadsMemory {
  void* data = nullptr;
  std::int64_t heads = 0, stride_batch = 0, stride_head = 0, stride_sequence = 0;
};

struct QkvMemory {
  void* packed = nullptr;        // [batch, sequence, all heads of q, then k, then v, of head_dim each], contiguous
  HeadsMemory parts[3];          // q, k, v
  const void* cosine = nullptr;  // [positions, head_dim / 2], f64 for f64 elements, otherwise f32; null: no rotation
  const void* sine = nullptr;
  std::int64_t batch = 0, sequence = 0, head_dim = 0;
  Element type = Element::f32;
};
// Out of the packed tensor, turning q and k; and back into it, turning them back. Where the parts are the packed tensor's
// own memory, v stays as it is.
void launch_split_qkv(const QkvMemory& memory, cudaStream_t stream);
void launch_merge_qkv(const QkvMemory& memory, cudaStream_t stream);

}  // namespace bonfire::cuda
