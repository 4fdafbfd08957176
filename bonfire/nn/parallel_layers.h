#pragma once

#include <cstdint>

#include "bonfire/base/api.h"
#include "bonfire/nn/layers.h"
#include "bonfire/nn/split_products.h"

// Layers of which each rank along the mesh's tensor axis has a part. They are given their part of the weights, and know
// nothing of the others: who builds a model decides who has what. Under the same names as the layers of one rank.
namespace bonfire::nn {

// Rows [first, first + own) of an embedding of `count` rows. The result is what lies between split layers.
class BONFIRE_API ParallelEmbeddingImpl : public EmbeddingImpl {
 public:
  struct Rows {
    std::int64_t first = 0, count = 0;
  };
  ParallelEmbeddingImpl(const at::Tensor& weight, Rows rows) : EmbeddingImpl(weight), rows_(rows) {}
  // What this rank has of the result, which the sum over ranks is: zeros for tokens of other ranks.
  at::Tensor part(const at::Tensor& tokens);

 private:
  Rows rows_;
};
TORCH_MODULE(ParallelEmbedding);

// `output` and the loss over its columns, of which this rank has [first, first + own) of `count`.
class BONFIRE_API ParallelOutputImpl : public LinearImpl {
 public:
  using Rows = ParallelEmbeddingImpl::Rows;
  ParallelOutputImpl(const at::Tensor& weight, Rows rows, TensorRanks ranks)
      : LinearImpl(weight), rows_(rows), ranks_(std::move(ranks)) {}
  // All columns, on every rank.
  at::Tensor whole(const at::Tensor& x);
  at::Tensor split_loss(const at::Tensor& x, const at::Tensor& target);

 private:
  Rows rows_;
  TensorRanks ranks_;
};
TORCH_MODULE(ParallelOutput);

// Self-attention of some of the heads. `options.layout` has the own heads, whole heads of keys and values among them;
// `sharing` are the ranks that read the same one, of which each makes some of its rows.
class BONFIRE_API ParallelAttentionImpl : public AttentionImpl {
 public:
  ParallelAttentionImpl(Linear qkv, Linear output, AttentionOptions options, TensorRanks ranks, Group sharing = {})
      : AttentionImpl(std::move(qkv), std::move(output), std::move(options)),
        ranks_(std::move(ranks)),
        sharing_(std::move(sharing)) {}
  at::Tensor forward(const Norm& norm, const at::Tensor& x) override;

 private:
  TensorRanks ranks_;
  Group sharing_;
};

// The feed-forward part with some of its width.
class BONFIRE_API ParallelFeedForwardImpl : public FeedForwardImpl {
 public:
  ParallelFeedForwardImpl(Activation activation, Linear up, Linear down, Dropout dropout, TensorRanks ranks)
      : FeedForwardImpl(activation, std::move(up), std::move(down), std::move(dropout)), ranks_(std::move(ranks)) {}
  at::Tensor forward(const Norm& norm, const at::Tensor& x) override;

 private:
  TensorRanks ranks_;
};

// Drops of what lies between split layers what one rank would drop.
at::Tensor dropped(const Dropout& dropout, const at::Tensor& x, const TensorRanks& ranks);

}  // namespace bonfire::nn
