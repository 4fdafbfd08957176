#pragma once

#include <functional>
#include <memory>

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include "bonfire/base/api.h"
#include "bonfire/kernels/fused_linear.h"
#include "bonfire/kernels/qkv.h"
#include "bonfire/nn/adapters.h"
#include "bonfire/nn/context_attention.h"
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
  // forward(norm(x)), and x to go on with beside it; the norm is not kept for backward.
  Streamed after(const NormImpl& norm, const at::Tensor& x);
  // Adds to its result from now on; what it reads is then kept for backward. A product that is adapted is not made in one
  // piece with what comes before it.
  void adapt(Adapters adapters) { adapters_ = register_module("adapters", std::move(adapters)); }
  bool adapted() const { return !adapters_.is_empty(); }
  // From now on its products are made in fp8; null: no longer.
  void set_fp8(std::shared_ptr<Fp8Product> fp8) { fp8_ = std::move(fp8); }
  const std::shared_ptr<Fp8Product>& fp8() const { return fp8_; }
  std::shared_ptr<WeightScales>* scales(const at::Tensor& parameter) override;
  std::shared_ptr<Fp8Product> fp8_product(const at::Tensor& parameter) override;
  // Whether fused products keep the norm, or the activation, that they read for backward all the same.
  void set_keep_norm(bool keep) { keep_norm_ = keep; }
  void set_keep_activation(bool keep) { keep_activation_ = keep; }
  // What a product with its weight takes, by itself or where it reads the norm, or the activation, of something.
  LinearOptions options(const at::Tensor& residual = {}) const;
  LinearOptions options_after_norm() const;
  LinearOptions options_after_activation() const;

 private:
  Adapters adapters_{nullptr};
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
  ContextRanks context{};
  std::shared_ptr<DropoutState> state{};  // whose documents keep to themselves; null: samples have none
};

// Self-attention. `qkv` makes queries, keys and values in one product.
class BONFIRE_API AttentionImpl : public torch::nn::Module {
 public:
  AttentionImpl(Linear qkv, Linear output, AttentionOptions options);
  // x plus the attention of its norm, [batch, sequence, dim].
  virtual at::Tensor forward(const Norm& norm, const at::Tensor& x);
  // The attention alone.
  at::Tensor branch(const Norm& norm, const at::Tensor& x);
  // Whether q, k and v are made again in backward.
  void set_recompute(bool recompute) { recompute_ = recompute; }

 protected:
  // The attention of the packed product that `make` makes of x, and x to go on with. It may be made twice.
  Streamed attended(const at::Tensor& x, const std::function<Streamed(const at::Tensor& x)>& make) const;

  bool recompute_ = false;
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
  virtual at::Tensor forward(const Norm& norm, const at::Tensor& x);
  // The feed-forward part alone.
  at::Tensor branch(const Norm& norm, const at::Tensor& x);
  // Whether what goes into the activation is made again in backward. With adapters it is kept all the same.
  void set_recompute(bool recompute) { recompute_ = recompute; }

 protected:
  Streamed apart(const Norm& norm, const at::Tensor& x, bool residual);

  bool recompute_ = false;
  Activation activation_;
  Linear up_, down_;
  Dropout dropout_;
};
TORCH_MODULE(FeedForward);

}  // namespace bonfire::nn
