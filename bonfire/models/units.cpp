#include "bonfire/models/units.h"

#include <ATen/ops/adaptive_avg_pool2d.h>
#include <ATen/ops/conv2d.h>
#include <ATen/ops/max_pool2d.h>
#include <ATen/ops/relu.h>

#include "bonfire/base/error.h"

namespace bonfire {

using at::Tensor;

Dropout dropout_in(const UnitContext& context, const plan::UnitDescription& unit, const char* region) {
  return Dropout(context.spec.dropout, context.dropout, unit.name + "." + region);
}

namespace {

nn::Linear take_linear(ParameterMaker& maker, const std::string& name) {
  const Tensor weight = maker.take(name + ".weight");
  return nn::Linear(weight, maker.take_if_any(name + ".bias"));
}

nn::Norm take_norm(ParameterMaker& maker, const std::string& name, double eps) {
  const Tensor weight = maker.take(name + ".weight");
  return nn::Norm(weight, maker.take_if_any(name + ".bias"), eps);
}

}  // namespace

TokenEmbeddingImpl::TokenEmbeddingImpl(const UnitContext& context, const plan::UnitDescription& unit)
    : tied_(context.tied.defined()), dropout_(dropout_in(context, unit, "embedding")) {
  ParameterMaker maker(unit, context.build);
  if (const Tensor positions = maker.take_if_any("positions"); positions.defined())
    positions_ = register_parameter("positions", positions, positions.requires_grad());
  tokens_ = nn::Embedding(tied_ ? context.tied : maker.take("tokens.weight"));
  if (!tied_) register_module("tokens", tokens_);
  maker.finish();
}

Tensor TokenEmbeddingImpl::forward(Tensor tokens) {
  Tensor x = tokens_->forward(tokens);
  if (!positions_.defined()) return x;
  const std::int64_t sequence = tokens.size(-1);
  require(sequence <= positions_.size(0), "the sequence has {} tokens; the model knows {} positions", sequence,
          positions_.size(0));
  return dropout_(x.add(positions_.narrow(0, 0, sequence)));
}

std::shared_ptr<GradientSink>* TokenEmbeddingImpl::slot(const Tensor& parameter) {
  return tied_ ? tokens_->slot(parameter) : nullptr;
}

VectorEmbeddingImpl::VectorEmbeddingImpl(const UnitContext& context, const plan::UnitDescription& unit) {
  ParameterMaker maker(unit, context.build);
  linear_ = register_module("linear", take_linear(maker, "linear"));
  maker.finish();
}

Tensor VectorEmbeddingImpl::forward(Tensor x) { return linear_->forward(x.to(linear_->weight.scalar_type())); }

TransformerBlockImpl::TransformerBlockImpl(const UnitContext& context, const plan::UnitDescription& unit) {
  ParameterMaker maker(unit, context.build);
  const auto& spec = context.spec;
  attention_norm_ = register_module("attention_norm", take_norm(maker, "attention_norm", spec.norm_eps));
  const nn::Linear qkv = take_linear(maker, "attention.qkv"), output = take_linear(maker, "attention.output");
  attention_ = register_module(
      "attention",
      nn::Attention(
          qkv, output,
          nn::AttentionOptions{
              .layout = {.heads = spec.heads, .kv_heads = spec.kv_heads, .rotary = context.rotary, .in_place = true},
              .dropout = dropout_in(context, unit, "attention")}));
  feed_norm_ = register_module("feed_norm", take_norm(maker, "feed_norm", spec.norm_eps));
  const bool gated = spec.type == plan::ModelType::llama;
  const nn::Linear up = take_linear(maker, gated ? "feed.gate_up" : "feed.up"), down = take_linear(maker, "feed.down");
  feed_ = register_module("feed", nn::FeedForward(gated ? nn::Activation::swiglu : nn::Activation::gelu, up, down,
                                                  dropout_in(context, unit, "feed")));
  maker.finish();
}

Tensor TransformerBlockImpl::forward(Tensor x) {
  return feed_->forward(feed_norm_, attention_->forward(attention_norm_, x));
}

MlpBlockImpl::MlpBlockImpl(const UnitContext& context, const plan::UnitDescription& unit) {
  ParameterMaker maker(unit, context.build);
  const nn::Linear up = take_linear(maker, "feed.up"), down = take_linear(maker, "feed.down");
  feed_ = register_module("feed", nn::FeedForward(nn::Activation::gelu, up, down, dropout_in(context, unit, "feed")));
  maker.finish();
}

Tensor MlpBlockImpl::forward(Tensor x) { return feed_->forward(nullptr, x); }

ConvolutionImpl::ConvolutionImpl(const UnitContext& context, const plan::UnitDescription& unit, int poolings)
    : poolings_(poolings) {
  ParameterMaker maker(unit, context.build);
  const Tensor weight = maker.take("weight"), bias = maker.take("bias");
  weight_ = register_parameter("weight", weight, weight.requires_grad());
  bias_ = register_parameter("bias", bias, bias.requires_grad());
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
  linear_ = register_module("linear", take_linear(maker, "linear"));
  maker.finish();
}

Tensor ClassifierImpl::forward(Tensor x) {
  if (x.dim() == 4) x = at::adaptive_avg_pool2d(x, {pool_, pool_}).flatten(1);
  return dropout_(at::relu(linear_->forward(x)));
}

OutputHeadImpl::OutputHeadImpl(const UnitContext& context, const plan::UnitDescription& unit)
    : tied_(context.tied.defined()) {
  ParameterMaker maker(unit, context.build);
  const bool normed = !unit.parameters.empty() && unit.parameters[0].name == "norm.weight";
  if (normed) norm_ = register_module("norm", take_norm(maker, "norm", context.spec.norm_eps));
  output_ = tied_ ? nn::Linear(context.tied) : take_linear(maker, "output");
  if (!tied_) register_module("output", output_);
  maker.finish();
}

Tensor OutputHeadImpl::forward(Tensor x, Tensor target) {
  if (norm_) x = norm_->forward(x);
  return target.defined() ? output_->loss(x, target) : output_->forward(x);
}

std::shared_ptr<GradientSink>* OutputHeadImpl::slot(const Tensor& parameter) {
  return tied_ ? output_->slot(parameter) : nullptr;
}

}  // namespace bonfire
