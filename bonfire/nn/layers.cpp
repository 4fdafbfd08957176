#include "bonfire/nn/layers.h"

#include <optional>
#include <utility>
#include <vector>

#include "bonfire/base/error.h"
#include "bonfire/kernels/activation.h"
#include "bonfire/kernels/cross_entropy.h"
#include "bonfire/kernels/embedding.h"
#include "bonfire/kernels/fp8.h"
#include "bonfire/kernels/norm.h"
#include "bonfire/kernels/product.h"
#include "bonfire/kernels/self_attention.h"
#include "bonfire/nn/made_again.h"

namespace bonfire::nn {

using at::Tensor;

namespace {

Tensor normed(const Tensor& x, const NormWeights& norm) {
  return norm.bias.defined() ? bonfire::layer_norm(x, norm.weight, norm.bias, norm.options)
                             : bonfire::rms_norm(x, norm.weight, norm.options);
}

}  // namespace

WeightedImpl::WeightedImpl(const Tensor& given_weight, const Tensor& given_bias) {
  weight = register_parameter("weight", given_weight, given_weight.requires_grad());
  if (given_bias.defined()) bias = register_parameter("bias", given_bias, given_bias.requires_grad());
}

std::shared_ptr<GradientSink>* WeightedImpl::slot(const Tensor& parameter) {
  if (parameter.is_same(weight)) return &weight_sink_;
  if (bias.defined() && parameter.is_same(bias)) return &bias_sink_;
  return nullptr;
}

std::shared_ptr<Fp8Product> LinearImpl::fp8_product(const Tensor& parameter) {
  return parameter.is_same(weight) ? fp8_ : nullptr;
}

std::shared_ptr<WeightScales>* LinearImpl::scales(const Tensor& parameter) {
  return fp8_ && parameter.is_same(weight) ? &fp8_->weight_scales() : nullptr;
}

LinearOptions LinearImpl::options(const Tensor& residual) const {
  return {.bias = bias, .residual = residual, .weight_sink = weight_sink_, .bias_sink = bias_sink_, .fp8 = fp8_};
}

Tensor LinearImpl::forward(const Tensor& given, const Tensor& residual) {
  if (!adapted()) return bonfire::linear(given, weight, options(residual));
  const Tensor x = given.contiguous();  // once, for both
  return adapters_->add_to(bonfire::linear(x, weight, options(residual)), x);
}

LinearOptions LinearImpl::options_after_norm() const {
  auto how = options();
  how.keep = keep_norm_;
  return how;
}

LinearOptions LinearImpl::options_after_activation() const {
  auto how = options();
  how.keep = keep_activation_;
  return how;
}

Streamed LinearImpl::after(const NormImpl& norm, const Tensor& x) {
  if (adapted()) return {.out = forward(normed(x, norm.weights())), .stream = x};
  return bonfire::normed_linear(x, norm.weights(), weight, options_after_norm());
}

Tensor LinearImpl::loss(const Tensor& x, const Tensor& target) {
  if (bias.defined() || adapted()) return bonfire::cross_entropy(forward(x), target, {});
  return bonfire::linear_cross_entropy(x, weight, target, {.weight_sink = weight_sink_});
}

Tensor EmbeddingImpl::forward(const Tensor& tokens) { return bonfire::embedding(weight, tokens, weight_sink_); }

Tensor NormImpl::forward(const Tensor& x) { return normed(x, weights()); }

NormWeights NormImpl::weights() const {
  return {.weight = weight, .bias = bias, .options = {.eps = eps_, .weight_sink = weight_sink_, .bias_sink = bias_sink_}};
}

AttentionImpl::AttentionImpl(Linear qkv, Linear output, AttentionOptions options)
    : qkv_(std::move(qkv)), output_(std::move(output)), options_(std::move(options)) {
  if (!options_.causal && options_.context.split())
    fail_config("attention that is not causal over {} ranks that share samples; allowed: causal",
                options_.context.group.size());
  require_heads(options_.context, options_.layout.heads, options_.layout.kv_heads);
  register_module("qkv", qkv_);
  register_module("output", output_);
}

Streamed AttentionImpl::attended(const Tensor& x, const std::function<Streamed(const Tensor& x)>& make) const {
  if (const auto documents = documents_of(options_.state); options_.context.split() || documents->separate()) {
    require(options_.causal, "attention that is not causal, of samples with documents; allowed: causal");
    const auto [qkv, stream] = make(x);
    return {context_attention(qkv, options_.layout, *documents, options_.context), stream};
  }
  AttentionShape shape{.causal = options_.causal};
  std::optional<MadeAgain> made;
  if (recompute_) {
    made.emplace(std::vector<Tensor>{x}, [make, layout = options_.layout](const auto& inputs, std::size_t count) {
      return bonfire::attention_reads(make(inputs[0]).out, layout, count);
    });
    shape.reads = [&made](const std::vector<Tensor>& read) { made->drop(read); };
  }
  const auto [qkv, stream] = make(x);
  return {bonfire::self_attention(qkv, options_.layout, shape), stream};
}

Tensor AttentionImpl::forward(const Norm& norm, const Tensor& x) {
  const auto [rows, stream] =
      attended(x, [norm, qkv = qkv_](const Tensor& from) mutable { return qkv->after(*norm, from); });
  // Dropout lies between the product and the sum, so it keeps them apart.
  if (options_.dropout.active()) return options_.dropout(output_->forward(rows)).add(stream);
  return output_->forward(rows, stream);
}

Tensor AttentionImpl::branch(const Norm& norm, const Tensor& x) {
  const Tensor rows =
      attended(x, [norm, qkv = qkv_](const Tensor& from) mutable { return qkv->after(*norm, from); }).out;
  return options_.dropout(output_->forward(rows));
}

FeedForwardImpl::FeedForwardImpl(Activation activation, Linear up, Linear down, Dropout dropout)
    : activation_(activation), up_(std::move(up)), down_(std::move(down)), dropout_(std::move(dropout)) {
  register_module(activation == Activation::swiglu ? "gate_up" : "up", up_);
  register_module("down", down_);
}

Streamed FeedForwardImpl::apart(const Norm& norm, const Tensor& x, bool residual) {
  if (up_->adapted() || down_->adapted()) {
    const auto [wide, stream] = norm ? up_->after(*norm, x) : Streamed{.out = up_->forward(x), .stream = x};
    const Tensor active = activation_ == Activation::swiglu ? bonfire::swiglu(wide) : bonfire::gelu(wide);
    return {.out = down_->forward(active, residual ? stream : Tensor()), .stream = stream};
  }
  FeedForwardParts parts{.norm = norm ? norm->weights() : NormWeights{},
                         .up = up_->weight,
                         .up_options = up_->options_after_norm(),
                         .activation = activation_,
                         .down = down_->weight,
                         .down_options = down_->options_after_activation(),
                         .residual = residual};
  std::optional<MadeAgain> made;
  if (recompute_) {
    made.emplace(std::vector<Tensor>{x}, [parts](const auto& inputs, std::size_t) {
      return std::vector<Tensor>{bonfire::feed_forward_wide(inputs[0], parts)};
    });
    parts.reads = [&made](const Tensor& wide) { made->drop({wide}); };
  }
  return bonfire::feed_forward(x, parts);
}

Tensor FeedForwardImpl::forward(const Norm& norm, const Tensor& x) {
  // Dropout lies between the product and the sum.
  const auto [out, stream] = apart(norm, x, !dropout_.active());
  return dropout_.active() ? dropout_(out).add(stream) : out;
}

Tensor FeedForwardImpl::branch(const Norm& norm, const Tensor& x) { return dropout_(apart(norm, x, false).out); }

}  // namespace bonfire::nn
