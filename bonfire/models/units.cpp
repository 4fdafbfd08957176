#include "bonfire/models/units.h"

#include <ATen/ops/adaptive_avg_pool2d.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/conv2d.h>
#include <ATen/ops/max_pool2d.h>
#include <ATen/ops/mean.h>
#include <ATen/ops/relu.h>

#include "bonfire/base/error.h"
#include "bonfire/kernels/embedding.h"
#include "bonfire/plan/adapters.h"

namespace bonfire {

using at::Tensor;

Dropout dropout_in(const UnitContext& context, const plan::UnitDescription& unit, const char* region) {
  return Dropout(context.spec.dropout, context.dropout, unit.name + "." + region);
}

namespace {

// Two streams, one behind the other, so that the first dimension counts samples as everywhere between Units.
Tensor streams_of(const Tensor& x) { return x.unflatten(0, {2, -1}); }

// A Unit while it is built.
struct Making {
  const UnitContext& context;
  const plan::UnitDescription& unit;
  ParameterMaker& maker;
};

nn::Linear take_linear(const Making& making, const std::string& name) {
  const auto& [context, unit, maker] = making;
  const Tensor weight = maker.take(name + ".weight");
  nn::Linear linear(weight, maker.take_if_any(name + ".bias"));
  const auto& spec = context.spec.adapter;
  std::vector<nn::AdapterPart> adapters;
  for (const auto& place : plan::adapters_of(unit, name)) {
    const std::string a = plan::adapter_parameter(name, place.name, 'a');
    adapters.push_back({.name = place.name, .a = maker.take(a), .b = {}, .begin = place.begin});
    adapters.back().b = maker.take(plan::adapter_parameter(name, place.name, 'b'));
    adapters.back().dropout = Dropout(spec.dropout, context.dropout, unit.name + "." + a);
  }
  if (!adapters.empty()) linear->adapt(nn::Adapters(std::move(adapters), spec.alpha / static_cast<double>(spec.rank)));
  return linear;
}

// Of the vocabulary.
nn::ParallelEmbeddingImpl::Rows own_rows(const UnitContext& context) {
  return {.first = context.part.begin(context.spec.vocab), .count = context.spec.vocab};
}

nn::Norm take_norm(ParameterMaker& maker, const std::string& name, double eps) {
  const Tensor weight = maker.take(name + ".weight");
  return nn::Norm(weight, maker.take_if_any(name + ".bias"), eps);
}

}  // namespace

TokenEmbeddingImpl::TokenEmbeddingImpl(const UnitContext& context, const plan::UnitDescription& unit)
    : ranks_(context.build.tensor),
      state_(context.dropout),
      tied_(context.tied.defined()),
      two_streams_(context.spec.reversible),
      dropout_(dropout_in(context, unit, "embedding")) {
  ParameterMaker maker(unit, context.build);
  if (const Tensor positions = maker.take_if_any("positions"); positions.defined())
    positions_ = register_parameter("positions", positions, positions.requires_grad());
  const Tensor weight = tied_ ? context.tied : maker.take("tokens.weight");
  if (context.part.ranks > 1) split_ = std::make_shared<nn::ParallelEmbeddingImpl>(weight, own_rows(context));
  tokens_ = split_ ? nn::Embedding(std::shared_ptr<nn::EmbeddingImpl>(split_)) : nn::Embedding(weight);
  if (!tied_) register_module("tokens", tokens_);
  maker.finish();
}

Tensor TokenEmbeddingImpl::forward(Tensor tokens) {
  const Tensor x = embed(std::move(tokens));
  return two_streams_ ? at::cat({x, x}) : x;
}

Tensor TokenEmbeddingImpl::embed(Tensor tokens) {
  const std::int64_t sequence = tokens.size(-1);
  tokens = own_positions(tokens, state_->context);
  if (!positions_.defined()) return split_ ? sum_of_parts(split_->part(tokens), ranks_) : tokens_->forward(tokens);
  require(sequence <= positions_.size(0), "the sequence has {} tokens; the model knows {} positions", sequence,
          positions_.size(0));
  Tensor places;  // undefined: in order
  if (const auto documents = documents_of(state_); documents->separate() || state_->context.ranks > 1)
    places = documents->places(state_->context, tokens.size(-1))->places(tokens.device());
  if (split_) return nn::dropped(dropout_, sum_of_parts(split_->part(tokens), positions_, places, ranks_), ranks_);
  const Tensor x = tokens_->forward(tokens);
  return dropout_(x.add(places.defined() ? bonfire::embedding(positions_, places) : positions_.narrow(0, 0, sequence)));
}

std::shared_ptr<GradientSink>* TokenEmbeddingImpl::slot(const Tensor& parameter) {
  return tied_ ? tokens_->slot(parameter) : nullptr;
}

VectorEmbeddingImpl::VectorEmbeddingImpl(const UnitContext& context, const plan::UnitDescription& unit) {
  ParameterMaker maker(unit, context.build);
  linear_ = register_module("linear", take_linear({context, unit, maker}, "linear"));
  maker.finish();
}

Tensor VectorEmbeddingImpl::forward(Tensor x) { return linear_->forward(x.to(linear_->weight.scalar_type())); }

TransformerBlockImpl::TransformerBlockImpl(const UnitContext& context, const plan::UnitDescription& unit) {
  ParameterMaker maker(unit, context.build);
  const auto& spec = context.spec;
  attention_norm_ = register_module("attention_norm", take_norm(maker, "attention_norm", spec.norm_eps));
  const Making making{context, unit, maker};
  const nn::Linear qkv = take_linear(making, "attention.qkv"), output = take_linear(making, "attention.output");
  const auto& ranks = context.build.tensor;
  const auto [heads, kv_heads, sharing] = plan::heads_of(spec, context.part);
  nn::AttentionOptions attention{
      .layout = {.heads = heads, .kv_heads = kv_heads, .rotary = context.rotary, .in_place = true},
      .dropout = dropout_in(context, unit, "attention"),
      .context = context.build.context,
      .state = context.dropout};
  if (ranks.split())
    attention_ = nn::Attention(std::shared_ptr<nn::AttentionImpl>(std::make_shared<nn::ParallelAttentionImpl>(
        qkv, output, std::move(attention), ranks, sharing > 1 ? ranks.group.neighbours(sharing) : Group())));
  else
    attention_ = nn::Attention(qkv, output, std::move(attention));
  register_module("attention", attention_);
  feed_norm_ = register_module("feed_norm", take_norm(maker, "feed_norm", spec.norm_eps));
  const bool gated = spec.type == plan::ModelType::llama;
  const nn::Linear up = take_linear(making, gated ? "feed.gate_up" : "feed.up"), down = take_linear(making, "feed.down");
  const auto activation = gated ? nn::Activation::swiglu : nn::Activation::gelu;
  const Dropout dropout = dropout_in(context, unit, "feed");
  if (ranks.split())
    feed_ = nn::FeedForward(std::shared_ptr<nn::FeedForwardImpl>(
        std::make_shared<nn::ParallelFeedForwardImpl>(activation, up, down, dropout, ranks)));
  else
    feed_ = nn::FeedForward(activation, up, down, dropout);
  register_module("feed", feed_);
  attention_->set_recompute(unit.recompute == plan::Recompute::selective);
  feed_->set_recompute(unit.recompute == plan::Recompute::selective);
  maker.finish();
  if (!spec.reversible) return;
  chain_ = context.chain;
  random_ = context.dropout;
}

Tensor TransformerBlockImpl::forward(Tensor x) {
  if (chain_)
    return reversible(
               streams_of(x),
               {.first = [norm = attention_norm_,
                          part = attention_](const Tensor& one) mutable { return part->branch(norm, one); },
                .second = [norm = feed_norm_, part = feed_](const Tensor& one) mutable { return part->branch(norm, one); },
                .parameters = parameters(),
                .random = random_,
                .chain = chain_})
        .flatten(0, 1);
  return feed_->forward(feed_norm_, attention_->forward(attention_norm_, x));
}

MlpBlockImpl::MlpBlockImpl(const UnitContext& context, const plan::UnitDescription& unit) {
  ParameterMaker maker(unit, context.build);
  const Making making{context, unit, maker};
  const nn::Linear up = take_linear(making, "feed.up"), down = take_linear(making, "feed.down");
  feed_ = register_module("feed", nn::FeedForward(nn::Activation::gelu, up, down, dropout_in(context, unit, "feed")));
  feed_->set_recompute(unit.recompute == plan::Recompute::selective);
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
  linear_ = register_module("linear", take_linear({context, unit, maker}, "linear"));
  maker.finish();
}

Tensor ClassifierImpl::forward(Tensor x) {
  if (x.dim() == 4) x = at::adaptive_avg_pool2d(x, {pool_, pool_}).flatten(1);
  return dropout_(at::relu(linear_->forward(x)));
}

OutputHeadImpl::OutputHeadImpl(const UnitContext& context, const plan::UnitDescription& unit)
    : ranks_(context.build.tensor),
      context_(context.build.context),
      tied_(context.tied.defined()),
      two_streams_(context.spec.reversible) {
  ParameterMaker maker(unit, context.build);
  const bool normed = !unit.parameters.empty() && unit.parameters[0].name == "norm.weight";
  if (normed) norm_ = register_module("norm", take_norm(maker, "norm", context.spec.norm_eps));
  if (context.part.ranks > 1) {
    split_ = std::make_shared<nn::ParallelOutputImpl>(tied_ ? context.tied : maker.take("output.weight"), own_rows(context),
                                                      ranks_);
    output_ = nn::Linear(std::shared_ptr<nn::LinearImpl>(split_));
  } else {
    output_ = tied_ ? nn::Linear(context.tied) : take_linear({context, unit, maker}, "output");
  }
  if (!tied_) register_module("output", output_);
  maker.finish();
}

Tensor OutputHeadImpl::forward(Tensor x, Tensor target) {
  if (two_streams_) x = streams_of(x).mean(0);
  if (split_)
    x = norm_between(x, norm_->weights(), ranks_);
  else if (norm_)
    x = norm_->forward(x);
  if (!target.defined()) return split_ ? split_->whole(x) : output_->forward(x);
  target = own_positions(target, context_.part());
  return weighed_by_targets(split_ ? split_->split_loss(x, target) : output_->loss(x, target), target, context_);
}

std::shared_ptr<GradientSink>* OutputHeadImpl::slot(const Tensor& parameter) {
  return tied_ ? output_->slot(parameter) : nullptr;
}

}  // namespace bonfire
