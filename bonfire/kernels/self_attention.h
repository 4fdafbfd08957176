#pragma once

#include <ATen/core/Tensor.h>

#include "bonfire/base/api.h"
#include "bonfire/kernels/attention.h"
#include "bonfire/kernels/qkv.h"

namespace bonfire {

// attention() of the three that split_qkv() cuts the packed product into: [batch, sequence, heads * head_dim]. Where the
// device can read them where they lie (on GPUs cuDNN's graphs, in bf16 and fp16), nothing is cut, and backward makes the
// packed gradient in one piece. What attention() says of equal bits holds here too.
BONFIRE_API at::Tensor self_attention(const at::Tensor& qkv, const QkvLayout& layout, const AttentionShape& shape);

// Such tensors once more: q, k and v, or, where `count` is 1, the packed product, turned. `qkv` may be overwritten where its
// layout says so. Outside autograd.
BONFIRE_API std::vector<at::Tensor> attention_reads(const at::Tensor& qkv, const QkvLayout& layout, std::size_t count);

}  // namespace bonfire
