#pragma once

#include <memory>
#include <optional>

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include "bonfire/base/api.h"
#include "bonfire/kernels/fused_linear.h"
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

class NormImpl;

// x weight^T + bias for a weight [out, in].
class BONFIRE_API LinearImpl : public WeightedImpl {
 public:
  using WeightedImpl::WeightedImpl;
  // With a residual the result is added to it inside the product.
  at::Tensor forward(const at::Tensor& x, const at::Tensor& residual = {});
  // The mean cross-entropy of the result against class numbers, without a second copy of the result.
  at::Tensor loss(const at::Tensor& x, const at::Tensor& target);
  // forward(norm(x)), for one reader, and x to go on with beside it; the norm is not kept for backward. Which activation
  // comes next lets the product apply it at once, where the device can.
  NormedLinear after(const NormImpl& norm, const at::Tensor& x, std::optional<Activation> next = {});
  // forward(activation(before.out), residual); the activation is not kept for backward.
  at::Tensor after(Activation activation, const NormedLinear& before, const at::Tensor& residual);
  // From now on its products are made in fp8; null: no longer.
  void set_fp8(std::shared_ptr<Fp8Product> fp8) { fp8_ = std::move(fp8); }
  const std::shared_ptr<Fp8Product>& fp8() const { return fp8_; }
  std::shared_ptr<WeightScales>* scales(const at::Tensor& parameter) override;
  // Whether `after` keeps the norm, or the activation, for backward all the same.
  void set_keep_norm(bool keep) { keep_norm_ = keep; }
  void set_keep_activation(bool keep) { keep_activation_ = keep; }

 private:
  LinearOptions options(const at::Tensor& residual = {}) const;
  std::shared_ptr<Fp8Product> fp8_;
  bool keep_norm_ = false, keep_activation_ = false;
};
TORCH_MODULE(Linear);

// Rows of a weight [count, dim] for int64 tokens.
class BONFIRE_API EmbeddingImpl : public WeightedImpl {
 public:
  using WeightedImpl::WeightedImpl;
  at::Tensor forward(const at::Tensor& tokens);
};
TORCH_MODULE(Embedding);

// RMSNorm, or LayerNorm where there is a bias.
class BONFIRE_API NormImpl : public WeightedImpl {
 public:
  NormImpl(const at::Tensor& weight, const at::Tensor& bias, double eps) : WeightedImpl(weight, bias), eps_(eps) {}
  at::Tensor forward(const at::Tensor& x);
  NormWeights weights() const;

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
  // x plus the attention of its norm, [batch, sequence, dim].
  at::Tensor forward(const Norm& norm, const at::Tensor& x);

 private:
  Linear qkv_, output_;
  AttentionOptions options_;
};
TORCH_MODULE(Attention);

using bonfire::Activation;

// The feed-forward part: up, an activation, down. For swiglu `up` holds gate and up in one product and is named gate_up.
class BONFIRE_API FeedForwardImpl : public torch::nn::Module {
 public:
  FeedForwardImpl(Activation activation, Linear up, Linear down, Dropout dropout = {});
  // x plus the feed-forward part of its norm, or of x itself where the norm is null.
  at::Tensor forward(const Norm& norm, const at::Tensor& x);

 private:
  Activation activation_;
  Linear up_, down_;
  Dropout dropout_;
};
TORCH_MODULE(FeedForward);

}  // namespace bonfire::nn
