#include "bonfire/nn/layers.h"

#include "bonfire/kernels/activation.h"
#include "bonfire/kernels/cross_entropy.h"
#include "bonfire/kernels/embedding.h"
#include "bonfire/kernels/fp8.h"
#include "bonfire/kernels/norm.h"
#include "bonfire/kernels/product.h"
#include "bonfire/kernels/self_attention.h"

namespace bonfire::nn {

using at::Tensor;

WeightedImpl::WeightedImpl(const Tensor& given_weight, const Tensor& given_bias) {
  weight = register_parameter("weight", given_weight, given_weight.requires_grad());
  if (given_bias.defined()) bias = register_parameter("bias", given_bias, given_bias.requires_grad());
}

std::shared_ptr<GradientSink>* WeightedImpl::slot(const Tensor& parameter) {
  if (parameter.is_same(weight)) return &weight_sink_;
  if (bias.defined() && parameter.is_same(bias)) return &bias_sink_;
  return nullptr;
}

std::shared_ptr<WeightScales>* LinearImpl::scales(const Tensor& parameter) {
  return fp8_ && parameter.is_same(weight) ? &fp8_->weight_scales() : nullptr;
}

LinearOptions LinearImpl::options(const Tensor& residual) const {
  return {.bias = bias, .residual = residual, .weight_sink = weight_sink_, .bias_sink = bias_sink_, .fp8 = fp8_};
}

Tensor LinearImpl::forward(const Tensor& x, const Tensor& residual) { return bonfire::linear(x, weight, options(residual)); }

NormedLinear LinearImpl::after(const NormImpl& norm, const Tensor& x, std::optional<Activation> next) {
  auto how = options();
  how.activation = next;
  how.keep = keep_norm_;
  how.one_reader = true;
  return bonfire::normed_linear(x, norm.weights(), weight, how);
}

Tensor LinearImpl::after(Activation activation, const NormedLinear& before, const Tensor& residual) {
  auto how = options(residual);
  how.active = before.active;
  how.keep = keep_activation_;
  return bonfire::activated_linear(before.out, activation, weight, how);
}

Tensor LinearImpl::loss(const Tensor& x, const Tensor& target) {
  if (bias.defined()) return bonfire::cross_entropy(forward(x), target, {});
  return bonfire::linear_cross_entropy(x, weight, target, {.weight_sink = weight_sink_});
}

Tensor EmbeddingImpl::forward(const Tensor& tokens) { return bonfire::embedding(weight, tokens, weight_sink_); }

Tensor NormImpl::forward(const Tensor& x) {
  const NormOptions options{.eps = eps_, .weight_sink = weight_sink_, .bias_sink = bias_sink_};
  return bias.defined() ? bonfire::layer_norm(x, weight, bias, options) : bonfire::rms_norm(x, weight, options);
}

NormWeights NormImpl::weights() const {
  return {.weight = weight, .bias = bias, .options = {.eps = eps_, .weight_sink = weight_sink_, .bias_sink = bias_sink_}};
}

AttentionImpl::AttentionImpl(Linear qkv, Linear output, AttentionOptions options)
    : qkv_(std::move(qkv)), output_(std::move(output)), options_(std::move(options)) {
  register_module("qkv", qkv_);
  register_module("output", output_);
}

Tensor AttentionImpl::forward(const Norm& norm, const Tensor& x) {
  const auto [qkv, stream, none] = qkv_->after(*norm, x);
  const Tensor rows = bonfire::self_attention(qkv, options_.layout, {.causal = options_.causal});
  // Dropout lies between the product and the sum, so it keeps them apart.
  if (options_.dropout.active()) return options_.dropout(output_->forward(rows)).add(stream);
  return output_->forward(rows, stream);
}

FeedForwardImpl::FeedForwardImpl(Activation activation, Linear up, Linear down, Dropout dropout)
    : activation_(activation), up_(std::move(up)), down_(std::move(down)), dropout_(std::move(dropout)) {
  register_module(activation == Activation::swiglu ? "gate_up" : "up", up_);
  register_module("down", down_);
}

Tensor FeedForwardImpl::forward(const Norm& norm, const Tensor& x) {
  const NormedLinear up = norm ? up_->after(*norm, x, activation_) : NormedLinear{up_->forward(x), x};
  if (dropout_.active()) return dropout_(down_->after(activation_, up, {})).add(up.stream);
  return down_->after(activation_, up, up.stream);
}

}  // namespace bonfire::nn
