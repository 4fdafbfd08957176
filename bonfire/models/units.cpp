#include "bonfire/models/units.h"

#include <ATen/ops/adaptive_avg_pool2d.h>
#include <ATen/ops/conv2d.h>
#include <ATen/ops/max_pool2d.h>
#include <ATen/ops/relu.h>

#include "bonfire/base/error.h"
#include "bonfire/kernels/activation.h"
#include "bonfire/kernels/cross_entropy.h"
#include "bonfire/kernels/embedding.h"
#include "bonfire/kernels/product.h"

namespace bonfire {

using at::Tensor;

Dropout dropout_in(const UnitContext& context, const plan::UnitDescription& unit, const char* region) {
  return Dropout(context.spec.dropout, context.dropout, unit.name + "." + region);
}

TokenEmbeddingImpl::TokenEmbeddingImpl(const UnitContext& context, const plan::UnitDescription& unit)
    : dropout_(dropout_in(context, unit, "embedding")) {
  ParameterMaker maker(unit, context.build);
  weight_ = context.tied.defined() ? context.tied : register_parameter("weight", maker.take("weight"));
  if (const Tensor positions = maker.take_if_any("positions"); positions.defined())
    positions_ = register_parameter("positions", positions);
  maker.finish();
}

Tensor TokenEmbeddingImpl::forward(Tensor tokens) {
  Tensor x = bonfire::embedding(weight_, tokens, weight_sink_);
  if (!positions_.defined()) return x;
  const std::int64_t sequence = tokens.size(-1);
  require(sequence <= positions_.size(0), "the sequence has {} tokens; the model knows {} positions", sequence,
          positions_.size(0));
  return dropout_(x.add(positions_.narrow(0, 0, sequence)));
}

std::shared_ptr<GradientSink>* TokenEmbeddingImpl::slot(const Tensor& parameter) {
  return parameter.is_same(weight_) ? &weight_sink_ : nullptr;
}

VectorEmbeddingImpl::VectorEmbeddingImpl(const UnitContext& context, const plan::UnitDescription& unit) {
  ParameterMaker maker(unit, context.build);
  weight_ = register_parameter("weight", maker.take("weight"));
  bias_ = register_parameter("bias", maker.take("bias"));
  maker.finish();
}

Tensor VectorEmbeddingImpl::forward(Tensor x) {
  return bonfire::linear(x.to(weight_.scalar_type()), weight_,
                         {.bias = bias_, .weight_sink = weight_sink_, .bias_sink = bias_sink_});
}

std::shared_ptr<GradientSink>* VectorEmbeddingImpl::slot(const Tensor& parameter) {
  if (parameter.is_same(weight_)) return &weight_sink_;
  return parameter.is_same(bias_) ? &bias_sink_ : nullptr;
}

TransformerBlockImpl::TransformerBlockImpl(const UnitContext& context, const plan::UnitDescription& unit) {
  ParameterMaker maker(unit, context.build);
  const auto& spec = context.spec;
  const auto linear_of = [&](const std::string& name) {
    const Tensor weight = maker.take(name + ".weight");
    return nn::Linear(weight, maker.take_if_any(name + ".bias"));
  };
  const auto norm_of = [&](const std::string& name) {
    const Tensor weight = maker.take(name + ".weight");
    return nn::Norm(weight, maker.take_if_any(name + ".bias"), spec.norm_eps);
  };
  attention_norm_ = register_module("attention_norm", norm_of("attention_norm"));
  const nn::Linear qkv = linear_of("attention.qkv"), output = linear_of("attention.output");
  attention_ = register_module(
      "attention", nn::Attention(qkv, output,
                                 nn::AttentionOptions{
                                     .layout = {.heads = spec.heads, .kv_heads = spec.kv_heads, .rotary = context.rotary},
                                     .dropout = dropout_in(context, unit, "attention")}));
  feed_norm_ = register_module("feed_norm", norm_of("feed_norm"));
  const bool gated = spec.type == plan::ModelType::llama;
  const nn::Linear up = linear_of(gated ? "feed.gate_up" : "feed.up"), down = linear_of("feed.down");
  feed_ = register_module("feed", nn::FeedForward(gated ? nn::Activation::swiglu : nn::Activation::gelu, up, down,
                                                  dropout_in(context, unit, "feed")));
  maker.finish();
}

Tensor TransformerBlockImpl::forward(Tensor x) {
  auto [to_attention, stream] = attention_norm_->fork(x);
  auto [to_feed, middle] = feed_norm_->fork(attention_->forward(to_attention, stream));
  return feed_->forward(to_feed, middle);
}

MlpBlockImpl::MlpBlockImpl(const UnitContext& context, const plan::UnitDescription& unit)
    : dropout_(dropout_in(context, unit, "feed")) {
  ParameterMaker maker(unit, context.build);
  const Tensor up = maker.take("up.weight"), up_bias = maker.take("up.bias");
  const Tensor down = maker.take("down.weight"), down_bias = maker.take("down.bias");
  up_ = register_module("up", nn::Linear(up, up_bias));
  down_ = register_module("down", nn::Linear(down, down_bias));
  maker.finish();
}

Tensor MlpBlockImpl::forward(Tensor x) { return down_->forward(dropout_(bonfire::gelu(up_->forward(x))), x); }

ConvolutionImpl::ConvolutionImpl(const UnitContext& context, const plan::UnitDescription& unit, int poolings)
    : poolings_(poolings) {
  ParameterMaker maker(unit, context.build);
  weight_ = register_parameter("weight", maker.take("weight"));
  bias_ = register_parameter("bias", maker.take("bias"));
  maker.finish();
}

Tensor ConvolutionImpl::forward(Tensor x) {
  x = at::relu(at::conv2d(x.to(weight_.scalar_type()), weight_, bias_, 1, 1));
  for (int i = 0; i < poolings_; ++i) x = at::max_pool2d(x, 2, 2);
  return x;
}

ClassifierImpl::ClassifierImpl(const UnitContext& context, const plan::UnitDescription& unit)
    : pool_(context.spec.pool), dropout_(dropout_in(context, unit, "classifier")) {
  ParameterMaker maker(unit, context.build);
  weight_ = register_parameter("weight", maker.take("weight"));
  bias_ = register_parameter("bias", maker.take("bias"));
  maker.finish();
}

Tensor ClassifierImpl::forward(Tensor x) {
  if (x.dim() == 4) x = at::adaptive_avg_pool2d(x, {pool_, pool_}).flatten(1);
  return dropout_(
      at::relu(bonfire::linear(x, weight_, {.bias = bias_, .weight_sink = weight_sink_, .bias_sink = bias_sink_})));
}

std::shared_ptr<GradientSink>* ClassifierImpl::slot(const Tensor& parameter) {
  if (parameter.is_same(weight_)) return &weight_sink_;
  return parameter.is_same(bias_) ? &bias_sink_ : nullptr;
}

OutputHeadImpl::OutputHeadImpl(const UnitContext& context, const plan::UnitDescription& unit) {
  ParameterMaker maker(unit, context.build);
  if (const Tensor weight = maker.take_if_any("norm.weight"); weight.defined())
    norm_ = register_module("norm", nn::Norm(weight, maker.take_if_any("norm.bias"), context.spec.norm_eps));
  if (context.tied.defined()) {
    weight_ = context.tied;
  } else {
    const Tensor weight = maker.take("output.weight");
    output_ = register_module("output", nn::Linear(weight, maker.take_if_any("output.bias")));
  }
  maker.finish();
}

Tensor OutputHeadImpl::forward(Tensor x, Tensor target) {
  if (norm_) x = norm_->forward(x);
  const Tensor& weight = output_ ? output_->weight : weight_;
  const auto& sink = output_ ? *output_->slot(weight) : tied_sink_;
  if (output_ && output_->bias.defined()) {
    const Tensor logits = output_->forward(x);
    return target.defined() ? bonfire::cross_entropy(logits, target, {}) : logits;
  }
  if (!target.defined()) return bonfire::linear(x, weight, {.weight_sink = sink});
  return bonfire::linear_cross_entropy(x, weight, target, {.weight_sink = sink});
}

std::shared_ptr<GradientSink>* OutputHeadImpl::slot(const Tensor& parameter) {
  return weight_.defined() && parameter.is_same(weight_) ? &tied_sink_ : nullptr;
}

}  // namespace bonfire
