#include "bonfire/kernels/norm.h"

#include <vector>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/native_layer_norm.h>
#include <ATen/ops/native_layer_norm_backward.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "bonfire/kernels/argument.h"
#include "bonfire/kernels/known_sums.h"
#include "bonfire/kernels/operator.h"
#include "bonfire/kernels/product.h"

namespace bonfire {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using ThreeTensors = std::tuple<Tensor, Tensor, Tensor>;
using FiveTensors = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

at::ScalarType statistics_type(const Tensor& x) { return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat; }

// As large as x where the norm is wanted again.
Tensor room_for_norm(const Tensor& x, bool again) { return again ? at::empty_like(x) : at::empty({0}, x.options()); }

ThreeTensors rms_norm_composite(const Tensor& x, const OptionalTensor& residual, const Tensor& weight, double eps) {
  const Tensor sum = residual ? x.add(*residual) : at::empty({0}, x.options());
  const Tensor wide = (residual ? sum : x).to(statistics_type(x));
  const Tensor rstd = wide.square().mean(-1, true).add_(eps).rsqrt_();
  return {wide.mul(rstd).mul_(weight).to(x.scalar_type()), sum, rstd.flatten()};
}

ThreeTensors rms_norm_backward_composite(const Tensor& d_normed, const OptionalTensor& d_sum, const Tensor& x,
                                         const Tensor& weight, const Tensor& rstd, bool again) {
  auto sizes = x.sizes().vec();
  sizes.back() = 1;
  const Tensor scale = rstd.view(sizes), scaled = x.to(rstd.scalar_type()).mul(scale);
  const Tensor d = d_normed.to(rstd.scalar_type());
  const Tensor weighted = d.mul(weight);
  Tensor dx = weighted.sub(scaled.mul(weighted.mul(scaled).mean(-1, true))).mul_(scale);
  if (d_sum) dx.add_(*d_sum);
  return {dx.to(x.scalar_type()), d.mul(scaled).view({-1, x.size(-1)}).sum(0),
          again ? scaled.mul(weight).to(x.scalar_type()) : room_for_norm(x, false)};
}

// Torch's kernels, in fp32 at least: some of them add up the gradients of narrow weights in their own type.
ThreeTensors layer_norm_composite(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps) {
  const auto type = statistics_type(x);
  auto [normed, mean, rstd] = at::native_layer_norm(x.to(type), {x.size(-1)}, weight.to(type), bias.to(type), eps);
  return {normed.to(x.scalar_type()), mean.flatten(), rstd.flatten()};
}

FiveTensors layer_norm_backward_composite(const Tensor& d_normed, const OptionalTensor& d_stream, const Tensor& x,
                                          const Tensor& given_weight, const Tensor& mean, const Tensor& rstd,
                                          const OptionalTensor& bias, bool sums) {
  const auto type = statistics_type(x);
  const Tensor weight = given_weight.to(type);
  // Of the bias only whether there is one matters.
  auto sizes = x.sizes().vec();
  sizes.back() = 1;
  auto [dx, dw, db] = at::native_layer_norm_backward(d_normed.to(type), x.to(type), {x.size(-1)}, mean.view(sizes),
                                                     rstd.view(sizes), weight, weight, {true, true, true});
  if (d_stream) dx.add_(*d_stream);
  Tensor normed = room_for_norm(x, false);
  if (bias) {
    normed = x.to(mean.scalar_type()).sub(mean.view(sizes)).mul_(rstd.view(sizes)).mul_(weight).add_(*bias);
    normed = normed.to(x.scalar_type());
  }
  dx = dx.to(x.scalar_type());
  return {dx, dw, db, normed, sums ? column_sums(dx.reshape({-1, dx.size(-1)})) : at::empty({0}, mean.options())};
}

// A gradient that is made beside that of the input; only its way to the parameter can be put off.
auto later(const std::shared_ptr<GradientSink>& sink, const Tensor& gradient, at::ScalarType type) {
  return [=] { return parameter_gradient(sink, gradient, type); };
}

struct RmsNormNode : BackwardNode {
  std::shared_ptr<GradientSink> weight_sink;
  bool with_residual = false;

  std::vector<std::size_t> parameters() const override { return {with_residual ? 2u : 1u}; }

  torch::autograd::variable_list backward(const torch::autograd::variable_list& gradients) override {
    const Tensor x = saved(0), weight = saved(1), rstd = saved(2);
    const Tensor dy = gradients[0].defined() ? gradients[0] : at::zeros(x.sizes(), x.options());
    const auto d =
        norm_backward(dy, gradients.size() > 1 ? gradients[1] : Tensor(), {.x = x, .weight = weight, .rstd = rstd});
    const std::size_t weight_at = with_residual ? 2 : 1;
    torch::autograd::variable_list out(num_outputs());
    out[0] = d.x;
    if (with_residual) out[1] = d.x;
    if (wants(weight_at)) give(out, weight_at, later(weight_sink, d.weight, weight.scalar_type()));
    return out;
  }
};

NormedStream rms_norm_node(const Tensor& x, const Tensor& residual, const Tensor& weight, const NormOptions& options,
                           bool keep_stream) {
  const bool with_residual = residual.defined();
  require_rows({"rms_norm", "x", x});
  require_sizes({"rms_norm", "weight", weight}, {x.size(-1)}, x);
  if (with_residual) require_alike({"rms_norm", "residual", residual}, x);
  auto node = with_residual ? make_node<RmsNormNode>(x, residual, weight) : make_node<RmsNormNode>(x, weight);
  NormedStream out;
  Tensor sum, rstd;
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    std::tie(out.normed, sum, rstd) =
        BONFIRE_OPERATOR("bonfire::rms_norm", ThreeTensors(const Tensor&, const OptionalTensor&, const Tensor&, double))
            .call(x, with_residual ? OptionalTensor(residual) : std::nullopt, weight, options.eps);
    // Without a residual the stream is x under another name, with a history of its own.
    if (keep_stream) out.stream = with_residual ? sum : x.tensor_data();
  }
  if (!node) return out;
  node->save(with_residual ? sum.tensor_data() : x);
  node->save(weight);
  node->save(rstd);
  node->weight_sink = options.weight_sink;
  node->with_residual = with_residual;
  torch::autograd::set_history(out.normed, node);
  if (keep_stream) torch::autograd::set_history(out.stream, node);
  return out;
}

struct LayerNormNode : BackwardNode {
  std::shared_ptr<GradientSink> weight_sink, bias_sink;
  std::shared_ptr<KnownSums> wanted;

  std::vector<std::size_t> parameters() const override { return {1, 2}; }

  torch::autograd::variable_list backward(const torch::autograd::variable_list& gradients) override {
    const Tensor x = saved(0), weight = saved(1);
    const Tensor dy = gradients[0].defined() ? gradients[0] : at::zeros(x.sizes(), x.options());
    const auto d = norm_backward(dy, gradients.size() > 1 ? gradients[1] : Tensor(),
                                 {.x = x, .weight = weight, .mean = saved(2), .rstd = saved(3), .sums = wanted != nullptr});
    if (wanted) *wanted = {.gradient = d.x, .sums = d.sums};
    torch::autograd::variable_list out(num_outputs());
    out[0] = d.x;
    if (wants(1)) give(out, 1, later(weight_sink, d.weight, weight.scalar_type()));
    if (wants(2)) give(out, 2, later(bias_sink, d.bias, weight.scalar_type()));
    return out;
  }
};

NormedStream layer_norm_node(const Tensor& x, const Tensor& weight, const Tensor& bias, const NormOptions& options,
                             bool keep_stream) {
  require_rows({"layer_norm", "x", x});
  require_sizes({"layer_norm", "weight", weight}, {x.size(-1)}, x);
  require_sizes({"layer_norm", "bias", bias}, {x.size(-1)}, x);
  auto node = make_node<LayerNormNode>(x, weight, bias);
  NormedStream out;
  Tensor mean, rstd;
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    const auto norm = norm_forward(x, weight, bias, options.eps);
    out.normed = norm.normed, mean = norm.mean, rstd = norm.rstd;
    if (keep_stream) out.stream = x.tensor_data();
  }
  if (!node) return out;
  for (const Tensor& tensor : {x, weight, mean, rstd}) node->save(tensor);
  node->weight_sink = options.weight_sink;
  node->bias_sink = options.bias_sink;
  node->wanted = sums_wanted(x);
  torch::autograd::set_history(out.normed, node);
  if (keep_stream) torch::autograd::set_history(out.stream, node);
  return out;
}

}  // namespace

NormForward norm_forward(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps) {
  NormForward out;
  Tensor none;
  if (bias.defined())
    std::tie(out.normed, out.mean, out.rstd) =
        BONFIRE_OPERATOR("bonfire::layer_norm", ThreeTensors(const Tensor&, const Tensor&, const Tensor&, double))
            .call(x, weight, bias, eps);
  else
    std::tie(out.normed, none, out.rstd) =
        BONFIRE_OPERATOR("bonfire::rms_norm", ThreeTensors(const Tensor&, const OptionalTensor&, const Tensor&, double))
            .call(x, std::nullopt, weight, eps);
  return out;
}

NormGradients norm_backward(const Tensor& d_normed, const Tensor& d_stream, const NormSaved& saved) {
  const auto optional = [](const Tensor& x) { return x.defined() ? OptionalTensor(x) : std::nullopt; };
  NormGradients d;
  if (saved.mean.defined())
    std::tie(d.x, d.weight, d.bias, d.normed, d.sums) =
        BONFIRE_OPERATOR("bonfire::layer_norm_backward",
                         FiveTensors(const Tensor&, const OptionalTensor&, const Tensor&, const Tensor&, const Tensor&,
                                     const Tensor&, const OptionalTensor&, bool))
            .call(d_normed, optional(d_stream), saved.x, saved.weight, saved.mean, saved.rstd,
                  saved.again ? optional(saved.bias) : std::nullopt, saved.sums);
  else
    std::tie(d.x, d.weight, d.normed) =
        BONFIRE_OPERATOR("bonfire::rms_norm_backward", ThreeTensors(const Tensor&, const OptionalTensor&, const Tensor&,
                                                                    const Tensor&, const Tensor&, bool))
            .call(d_normed, optional(d_stream), saved.x, saved.weight, saved.rstd, saved.again);
  if (!saved.sums) d.sums = Tensor();
  return d;
}

NormedStream rms_norm_stream(const Tensor& x, const Tensor& residual, const Tensor& weight, const NormOptions& options) {
  return rms_norm_node(x, residual, weight, options, true);
}

Tensor rms_norm(const Tensor& x, const Tensor& weight, const NormOptions& options) {
  return rms_norm_node(x, {}, weight, options, false).normed;
}

NormedStream layer_norm_stream(const Tensor& x, const Tensor& weight, const Tensor& bias, const NormOptions& options) {
  return layer_norm_node(x, weight, bias, options, true);
}

Tensor layer_norm(const Tensor& x, const Tensor& weight, const Tensor& bias, const NormOptions& options) {
  return layer_norm_node(x, weight, bias, options, false).normed;
}

TORCH_LIBRARY_IMPL(bonfire, CompositeExplicitAutograd, m) {
  m.impl("layer_norm", layer_norm_composite);
  m.impl("layer_norm_backward", layer_norm_backward_composite);
  m.impl("rms_norm", rms_norm_composite);
  m.impl("rms_norm_backward", rms_norm_backward_composite);
}

}  // namespace bonfire
