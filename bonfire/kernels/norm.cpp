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

#include "bonfire/base/error.h"
#include "bonfire/kernels/known_sums.h"
#include "bonfire/kernels/operator.h"
#include "bonfire/kernels/product.h"
#include "bonfire/kernels/vectorize.h"

namespace bonfire {
namespace {

using at::Tensor;
using cpu::compute_t;
using cpu::load;
using cpu::store;
using OptionalTensor = std::optional<Tensor>;
using ThreeTensors = std::tuple<Tensor, Tensor, Tensor>;
using FiveTensors = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

template <class T>
BONFIRE_INLINE void forward_row(const T* __restrict x, const T* __restrict residual, const compute_t<T>* __restrict weight,
                                T* __restrict sum, T* __restrict y, compute_t<T>* rstd, std::int64_t n, double eps) {
  using C = compute_t<T>;
  C squares = 0;
  if (residual) {
#pragma omp simd reduction(+ : squares)
    for (std::int64_t i = 0; i < n; ++i) {
      const T rounded = store<T>(load(x[i]) + load(residual[i]));
      sum[i] = rounded;
      squares += load(rounded) * load(rounded);
    }
    x = sum;
  } else {
#pragma omp simd reduction(+ : squares)
    for (std::int64_t i = 0; i < n; ++i) squares += load(x[i]) * load(x[i]);
  }
  const C scale = C(1) / std::sqrt(squares / static_cast<C>(n) + static_cast<C>(eps));
  *rstd = scale;
#pragma omp simd
  for (std::int64_t i = 0; i < n; ++i) y[i] = store<T>(load(x[i]) * scale * weight[i]);
}

// Adds this row's part of the weight's gradient to `dw`.
template <class T>
BONFIRE_INLINE void backward_row(const T* __restrict dy, const T* __restrict dsum, const T* __restrict x,
                                 const compute_t<T>* __restrict weight, compute_t<T> rstd, T* __restrict dx,
                                 compute_t<T>* __restrict dw, T* __restrict normed, std::int64_t n) {
  using C = compute_t<T>;
  C dot = 0;
#pragma omp simd reduction(+ : dot)
  for (std::int64_t i = 0; i < n; ++i) {
    const C scaled = load(x[i]) * rstd, d = load(dy[i]);
    dot += d * weight[i] * scaled;
    dw[i] += d * scaled;
  }
  const C mean = dot / static_cast<C>(n);
  if (dsum) {
#pragma omp simd
    for (std::int64_t i = 0; i < n; ++i)
      dx[i] = store<T>(load(dsum[i]) + rstd * (load(dy[i]) * weight[i] - load(x[i]) * rstd * mean));
  } else {
#pragma omp simd
    for (std::int64_t i = 0; i < n; ++i) dx[i] = store<T>(rstd * (load(dy[i]) * weight[i] - load(x[i]) * rstd * mean));
  }
  if (!normed) return;
#pragma omp simd
  for (std::int64_t i = 0; i < n; ++i) normed[i] = store<T>(load(x[i]) * rstd * weight[i]);
}

template <class T>
struct ForwardArguments {
  const T *x, *residual;
  const compute_t<T>* weight;
  T *sum, *y;
  compute_t<T>* rstd;
  std::int64_t columns;
  double eps;
};

template <class T>
struct BackwardArguments {
  const T *dy, *dsum, *x;
  const compute_t<T>*weight, *rstd;
  T* dx;
  T* normed;  // or null
  std::int64_t columns;
};

template <class T>
BONFIRE_INLINE void forward_loop(const ForwardArguments<T>& a, std::int64_t begin, std::int64_t end) {
  for (std::int64_t row = begin; row < end; ++row) {
    const std::int64_t at = row * a.columns;
    forward_row<T>(a.x + at, a.residual ? a.residual + at : nullptr, a.weight, a.residual ? a.sum + at : nullptr, a.y + at,
                   a.rstd + row, a.columns, a.eps);
  }
}

template <class T>
BONFIRE_INLINE void backward_loop(const BackwardArguments<T>& a, compute_t<T>* dw, std::int64_t begin, std::int64_t end) {
  for (std::int64_t row = begin; row < end; ++row) {
    const std::int64_t at = row * a.columns;
    backward_row<T>(a.dy + at, a.dsum ? a.dsum + at : nullptr, a.x + at, a.weight, a.rstd[row], a.dx + at, dw,
                    a.normed ? a.normed + at : nullptr, a.columns);
  }
}

#define BONFIRE_NORM_KERNELS(T)                                                                          \
  BONFIRE_CLONES void forward_rows(const ForwardArguments<T>& a, std::int64_t begin, std::int64_t end) { \
    forward_loop<T>(a, begin, end);                                                                      \
  }                                                                                                      \
  BONFIRE_CLONES void backward_rows(const BackwardArguments<T>& a, compute_t<T>* dw, std::int64_t begin, \
                                    std::int64_t end) {                                                  \
    backward_loop<T>(a, dw, begin, end);                                                                 \
  }

BONFIRE_NORM_KERNELS(float)
BONFIRE_NORM_KERNELS(double)
BONFIRE_NORM_KERNELS(c10::BFloat16)
BONFIRE_NORM_KERNELS(c10::Half)

at::ScalarType statistics_type(const Tensor& x) { return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat; }

ThreeTensors rms_norm_cpu(const Tensor& given, const OptionalTensor& residual, const Tensor& given_weight, double eps) {
  const Tensor x = given.contiguous(), weight = given_weight.to(statistics_type(x)).contiguous();
  const Tensor other = residual ? residual->contiguous() : Tensor();
  const std::int64_t columns = x.size(-1), rows = columns ? x.numel() / columns : 0;
  Tensor y = at::empty_like(x), sum = residual ? at::empty_like(x) : at::empty({0}, x.options());
  Tensor rstd = at::empty({rows}, x.options().dtype(statistics_type(x)));
  cpu::dispatch_floating(x.scalar_type(), "rms_norm", [&](auto t) {
    using T = decltype(t);
    const ForwardArguments<T> arguments{.x = x.const_data_ptr<T>(),
                                        .residual = other.defined() ? other.const_data_ptr<T>() : nullptr,
                                        .weight = weight.const_data_ptr<compute_t<T>>(),
                                        .sum = sum.data_ptr<T>(),
                                        .y = y.data_ptr<T>(),
                                        .rstd = rstd.data_ptr<compute_t<T>>(),
                                        .columns = columns,
                                        .eps = eps};
    at::parallel_for(0, rows, cpu::grain(columns),
                     [&](std::int64_t begin, std::int64_t end) { forward_rows(arguments, begin, end); });
  });
  return {y, sum, rstd};
}

// As large as x where the norm is wanted again.
Tensor room_for_norm(const Tensor& x, bool again) { return again ? at::empty_like(x) : at::empty({0}, x.options()); }

ThreeTensors rms_norm_backward_cpu(const Tensor& d_normed, const OptionalTensor& d_sum, const Tensor& given,
                                   const Tensor& given_weight, const Tensor& rstd, bool again) {
  const Tensor x = given.contiguous(), weight = given_weight.to(statistics_type(x)).contiguous();
  const Tensor dy = d_normed.contiguous(), ds = d_sum ? d_sum->contiguous() : Tensor();
  const std::int64_t columns = x.size(-1), rows = columns ? x.numel() / columns : 0;
  // Parts of a fixed number of rows, so that the sum does not depend on the number of threads.
  constexpr std::int64_t rows_per_part = 256;
  const std::int64_t parts = std::max<std::int64_t>(1, (rows + rows_per_part - 1) / rows_per_part);
  Tensor dx = at::empty_like(x), dw = at::zeros({parts, columns}, rstd.options()), normed = room_for_norm(x, again);
  cpu::dispatch_floating(x.scalar_type(), "rms_norm_backward", [&](auto t) {
    using T = decltype(t);
    const BackwardArguments<T> arguments{.dy = dy.const_data_ptr<T>(),
                                         .dsum = ds.defined() ? ds.const_data_ptr<T>() : nullptr,
                                         .x = x.const_data_ptr<T>(),
                                         .weight = weight.const_data_ptr<compute_t<T>>(),
                                         .rstd = rstd.const_data_ptr<compute_t<T>>(),
                                         .dx = dx.data_ptr<T>(),
                                         .normed = again ? normed.data_ptr<T>() : nullptr,
                                         .columns = columns};
    auto* sums = dw.data_ptr<compute_t<T>>();
    at::parallel_for(0, parts, 1, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t part = begin; part < end; ++part)
        backward_rows(arguments, sums + part * columns, part * rows_per_part, std::min(rows, (part + 1) * rows_per_part));
    });
  });
  return {dx, parts == 1 ? dw[0] : dw.sum(0), normed};
}

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

// Torch's kernels. A weight of another type than x's meets it in the wider one.
ThreeTensors layer_norm_composite(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps) {
  const auto type = c10::promoteTypes(x.scalar_type(), weight.scalar_type());
  auto [normed, mean, rstd] = at::native_layer_norm(x.to(type), {x.size(-1)}, weight.to(type), bias.to(type), eps);
  return {normed.to(x.scalar_type()), mean, rstd};
}

FiveTensors layer_norm_backward_composite(const Tensor& d_normed, const OptionalTensor& d_stream, const Tensor& x,
                                          const Tensor& given_weight, const Tensor& mean, const Tensor& rstd,
                                          const OptionalTensor& bias, bool sums) {
  const auto type = c10::promoteTypes(x.scalar_type(), given_weight.scalar_type());
  const Tensor weight = given_weight.to(type);
  // Of the bias only whether there is one matters.
  auto [dx, dw, db] = at::native_layer_norm_backward(d_normed.to(type), x.to(type), {x.size(-1)}, mean, rstd, weight, weight,
                                                     {true, true, true});
  if (d_stream) dx.add_(*d_stream);
  Tensor normed = room_for_norm(x, false);
  if (bias) {
    auto sizes = x.sizes().vec();
    sizes.back() = 1;
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
  require(x.size(-1) == weight.numel(), "rms_norm: the last dimension is {}, the weight has {} elements", x.size(-1),
          weight.numel());
  const bool with_residual = residual.defined();
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

TORCH_LIBRARY_IMPL(bonfire, CPU, m) {
  m.impl("rms_norm", rms_norm_cpu);
  m.impl("rms_norm_backward", rms_norm_backward_cpu);
}

TORCH_LIBRARY_IMPL(bonfire, CompositeExplicitAutograd, m) {
  m.impl("layer_norm", layer_norm_composite);
  m.impl("layer_norm_backward", layer_norm_backward_composite);
  m.impl("rms_norm", rms_norm_composite);
  m.impl("rms_norm_backward", rms_norm_backward_composite);
}

}  // namespace bonfire
