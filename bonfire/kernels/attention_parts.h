#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>

#include "bonfire/base/api.h"

// Attention over some of the keys at a time: what is made of each part, and how parts come together. Outside autograd.
namespace bonfire {

// Rows [query, query + queries) meet keys [key, key + keys). Causal: there are as many of both, and a row meets the keys up
// to its own.
struct AttentionPart {
  std::int64_t query = 0, queries = 0;
  std::int64_t key = 0, keys = 0;
  bool causal = false;

  bool operator==(const AttentionPart&) const = default;
};

// What queries make of some keys. `out` [batch, heads, queries, head_dim] in any order in memory, `log_sums` [batch, heads,
// queries] of the exponentials, in fp32 or, of fp64, in fp64.
struct PartialAttention {
  at::Tensor out, log_sums;
};

// softmax(q k^T / sqrt(head_dim)) v for q [batch, heads, queries, head_dim] and k, v [batch, kv_heads, keys, head_dim];
// kv_heads divides heads. On the CPU by our kernels or torch's, on GPUs by flash attention in bf16 and fp16; otherwise by
// scores, which exist for some heads at a time.
BONFIRE_API PartialAttention partial_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, bool causal);

// What one part adds to the gradients. `out` and `log_sums` are those over all keys.
struct PartialAttentionSaved {
  at::Tensor q, k, v, out, log_sums;
};
struct PartialAttentionGradients {
  at::Tensor q, k, v;
};
BONFIRE_API PartialAttentionGradients partial_attention_backward(const at::Tensor& d_out, const PartialAttentionSaved& saved,
                                                                 bool causal);

// The type in which parts come together.
BONFIRE_API at::ScalarType sum_type(at::ScalarType type);

// Adds a part to what is there of its rows: `out` [batch, queries, heads, head_dim] in sum_type, `log_sums` [batch, heads,
// queries]. Both are views that are written to.
BONFIRE_API void add_part(const at::Tensor& out, const at::Tensor& log_sums, const PartialAttention& part);

// The same two by scores, on any device and in any type.
struct ScoredOptions {
  bool causal = false;
  std::int64_t most_bytes = std::int64_t{64} << 20;  // of scores at a time, but never less than those of one head
};
BONFIRE_API PartialAttention scored_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                              const ScoredOptions& options);
BONFIRE_API PartialAttentionGradients scored_attention_backward(const at::Tensor& d_out, const PartialAttentionSaved& saved,
                                                                const ScoredOptions& options);

}  // namespace bonfire
