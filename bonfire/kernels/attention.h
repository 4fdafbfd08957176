#pragma once

#include <functional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "bonfire/base/api.h"

namespace bonfire {

struct AttentionShape {
  bool causal = true;
  // Of self_attention(): told, before it saves them, of the tensors that attention reads. They are those of
  // attention_reads().
  std::function<void(const std::vector<at::Tensor>& read)> reads{};
};

// softmax(q k^T / sqrt(head_dim)) v for q [batch, heads, sequence, head_dim] and k, v [batch, kv_heads, sequence, head_dim];
// kv_heads divides heads. The result is [batch, sequence, heads * head_dim], as the product behind it reads it. Torch's
// kernels (on GPUs cuDNN's where it knows the shape, otherwise torch's choice), except causal attention in fp32 on
// processors where ours are faster. Backward on a GPU in bf16 and fp16 adds in an order that varies, unless torch is told to
// use deterministic algorithms (at::globalContext().setDeterministicAlgorithms), which takes other kernels.
BONFIRE_API at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const AttentionShape& shape);

// Whether cuDNN has kernels for attention of a sequence with itself, forward and backward, and may be used: it adds in an
// order that varies.
BONFIRE_API bool cudnn_takes_attention(at::ScalarType type, std::int64_t head_dim, std::int64_t sequence);

namespace cpu {

// Our kernels. Contiguous fp32 tensors; `log_sums` [batch, heads, sequence] goes from forward to backward.
// REQUIRES: can_multiply().
struct AttentionForward {
  at::Tensor out, log_sums;
};
BONFIRE_API AttentionForward causal_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v);

struct AttentionSaved {
  at::Tensor q, k, v, out, log_sums;
};
struct AttentionGradients {
  at::Tensor q, k, v;
};
BONFIRE_API AttentionGradients causal_attention_backward(const at::Tensor& d_out, const AttentionSaved& saved);

}  // namespace cpu
}  // namespace bonfire
