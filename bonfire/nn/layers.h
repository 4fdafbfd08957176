#pragma once

#include <memory>

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include "bonfire/base/api.h"
#include "bonfire/kernels/qkv.h"
#include "bonfire/nn/dropout_state.h"
#include "bonfire/nn/gradient_slots.h"

// Layers over our kernels. They are given their parameters: who builds a model decides names, shapes and values, and, by
// requires_grad, what is trained.
namespace bonfire::nn {

// A weight and perhaps a bias, each with its sink.
class BONFIRE_API WeightedImpl : public torch::nn::Module, public GradientSlots {
 public:
  explicit WeightedImpl(const at::Tensor& weight, const at::Tensor& bias = {});
  std::shared_ptr<GradientSink>* slot(const at::Tensor& parameter) override;

  at::Tensor weight;
  at::Tensor bias;  // undefined: none

 protected:
  std::shared_ptr<GradientSink> weight_sink_, bias_sink_;
};

// x weight^T + bias for a weight [out, in].
class BONFIRE_API LinearImpl : public WeightedImpl {
 public:
  using WeightedImpl::WeightedImpl;
  // With a residual the result is added to it inside the product.
  at::Tensor forward(const at::Tensor& x, const at::Tensor& residual = {});
  // The mean cross-entropy of the result against class numbers, without a second copy of the result.
  at::Tensor loss(const at::Tensor& x, const at::Tensor& target);
};
TORCH_MODULE(Linear);

// Rows of a weight [count, dim] for int64 tokens.
class BONFIRE_API EmbeddingImpl : public WeightedImpl {
 public:
  using WeightedImpl::WeightedImpl;
  at::Tensor forward(const at::Tensor& tokens);
};
TORCH_MODULE(Embedding);

// A residual stream and its norm, see kernels/norm.h.
struct Stream {
  at::Tensor normed;
  at::Tensor stream;
};

// RMSNorm, or LayerNorm where there is a bias.
class BONFIRE_API NormImpl : public WeightedImpl {
 public:
  NormImpl(const at::Tensor& weight, const at::Tensor& bias, double eps) : WeightedImpl(weight, bias), eps_(eps) {}
  at::Tensor forward(const at::Tensor& x);
  // The norm of x, and x to go on with beside it.
  Stream fork(const at::Tensor& x);

 private:
  double eps_;
};
TORCH_MODULE(Norm);

struct AttentionOptions {
  QkvLayout layout{};
  bool causal = true;
  Dropout dropout{};  // of what is added to the stream
};

// Self-attention. `qkv` makes queries, keys and values in one product.
class BONFIRE_API AttentionImpl : public torch::nn::Module {
 public:
  AttentionImpl(Linear qkv, Linear output, AttentionOptions options);
  // `stream` plus the attention of `normed`, both [batch, sequence, dim].
  at::Tensor forward(const at::Tensor& normed, const at::Tensor& stream);

 private:
  Linear qkv_, output_;
  AttentionOptions options_;
};
TORCH_MODULE(Attention);

enum class Activation { swiglu, gelu };

// The feed-forward part: up, an activation, down. For swiglu `up` holds gate and up in one product and is named gate_up.
class BONFIRE_API FeedForwardImpl : public torch::nn::Module {
 public:
  FeedForwardImpl(Activation activation, Linear up, Linear down, Dropout dropout = {});
  at::Tensor forward(const at::Tensor& normed, const at::Tensor& stream);

 private:
  Activation activation_;
  Linear up_, down_;
  Dropout dropout_;
};
TORCH_MODULE(FeedForward);

}  // namespace bonfire::nn
