#pragma once

#include <tuple>

#include <ATen/core/Tensor.h>

#include "bonfire/base/api.h"

namespace bonfire {

// Cosines and sines of rotary positions, [positions, head_dim / 2] each, in fp32 or fp64.
struct RotaryTable {
  at::Tensor cosine;
  at::Tensor sine;
};

struct RotaryShape {
  std::int64_t positions = 0;
  std::int64_t head_dim = 0;
  double theta = 10000;
};

BONFIRE_API RotaryTable rotary_table(const RotaryShape& shape, const at::TensorOptions& options);

struct QkvLayout {
  std::int64_t heads = 1;
  std::int64_t kv_heads = 1;
  RotaryTable rotary{};   // undefined: no rotation
  bool in_place = false;  // whether the packed product may be overwritten; nobody else reads it then
};

// Fails unless qkv is a packed product of that layout, of no more positions than the table has.
void require_packed(const at::Tensor& qkv, const QkvLayout& layout);

// Cuts the packed product [batch, sequence, (heads + 2 kv_heads) * head_dim] into q, k and v, each [batch, its heads,
// sequence, head_dim] (on the CPU contiguous), and rotates q and k in the half-rotation order of Hugging Face: element i
// turns with element i + head_dim / 2. Backward turns back and packs in one pass.
BONFIRE_API std::tuple<at::Tensor, at::Tensor, at::Tensor> split_qkv(const at::Tensor& qkv, const QkvLayout& layout);

// The packed product, contiguous, with q and k turned where they lie: qkv itself where that may be overwritten or nothing
// turns. Outside autograd.
BONFIRE_API at::Tensor turned_qkv(const at::Tensor& qkv, const QkvLayout& layout);

}  // namespace bonfire
