#include "bonfire/nn/layers.h"

#include "bonfire/kernels/activation.h"
#include "bonfire/kernels/attention.h"
#include "bonfire/kernels/cross_entropy.h"
#include "bonfire/kernels/embedding.h"
#include "bonfire/kernels/norm.h"
#include "bonfire/kernels/product.h"

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

Tensor LinearImpl::forward(const Tensor& x, const Tensor& residual) {
  return bonfire::linear(x, weight,
                         {.bias = bias, .residual = residual, .weight_sink = weight_sink_, .bias_sink = bias_sink_});
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

Stream NormImpl::fork(const Tensor& x) {
  const NormOptions options{.eps = eps_, .weight_sink = weight_sink_, .bias_sink = bias_sink_};
  auto [normed, stream] = bias.defined() ? bonfire::layer_norm_stream(x, weight, bias, options)
                                         : bonfire::rms_norm_stream(x, {}, weight, options);
  return {std::move(normed), std::move(stream)};
}

namespace {

// output(x) + stream. Dropout lies between the product and the sum, so it keeps them apart.
Tensor add_to_stream(Linear& output, const Tensor& x, const Tensor& stream, const Dropout& dropout) {
  if (!dropout.active()) return output->forward(x, stream);
  return dropout(output->forward(x)).add(stream);
}

}  // namespace

AttentionImpl::AttentionImpl(Linear qkv, Linear output, AttentionOptions options)
    : qkv_(std::move(qkv)), output_(std::move(output)), options_(std::move(options)) {
  register_module("qkv", qkv_);
  register_module("output", output_);
}

Tensor AttentionImpl::forward(const Tensor& normed, const Tensor& stream) {
  const auto [q, k, v] = bonfire::split_qkv(qkv_->forward(normed), options_.layout);
  const Tensor rows = bonfire::attention(q, k, v, {.causal = options_.causal});
  return add_to_stream(output_, rows, stream, options_.dropout);
}

FeedForwardImpl::FeedForwardImpl(Activation activation, Linear up, Linear down, Dropout dropout)
    : activation_(activation), up_(std::move(up)), down_(std::move(down)), dropout_(std::move(dropout)) {
  register_module(activation == Activation::swiglu ? "gate_up" : "up", up_);
  register_module("down", down_);
}

Tensor FeedForwardImpl::forward(const Tensor& normed, const Tensor& stream) {
  const Tensor wide = up_->forward(normed);
  return add_to_stream(down_, activation_ == Activation::swiglu ? bonfire::swiglu(wide) : bonfire::gelu(wide), stream,
                       dropout_);
}

}  // namespace bonfire::nn
