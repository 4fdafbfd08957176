#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "bonfire/kernels/vectorize.h"

// Norms on the CPU. Sums are made in fp32 at least and rounded once, whatever the types of x and the weights.
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

// Sums over rows are made in parts of a fixed number of them, so that they do not depend on the number of threads.
constexpr std::int64_t kRowsPerPart = 256;
std::int64_t parts_of(std::int64_t rows) { return std::max<std::int64_t>(1, (rows + kRowsPerPart - 1) / kRowsPerPart); }

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
  const std::int64_t parts = parts_of(rows);
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
        backward_rows(arguments, sums + part * columns, part * kRowsPerPart, std::min(rows, (part + 1) * kRowsPerPart));
    });
  });
  return {dx, parts == 1 ? dw[0] : dw.sum(0), normed};
}

template <class T>
struct LayerNormForward {
  const T* x;
  const compute_t<T>*weight, *bias;
  T* y;
  compute_t<T>*mean, *rstd;
  std::int64_t columns;
  double eps;
};

template <class T>
struct LayerNormBackward {
  const T *dy, *d_stream, *x;  // d_stream: or null
  const compute_t<T>*weight, *bias, *mean, *rstd;
  T *dx, *normed;  // normed: or null
  std::int64_t columns;
};

// Where a part of the rows adds what it finds.
template <class C>
struct LayerNormSums {
  C *weight, *bias, *dx;  // dx: or null
};

template <class T>
BONFIRE_INLINE void write_layer_norm(const T* __restrict x, const compute_t<T>* __restrict weight,
                                     const compute_t<T>* __restrict bias, compute_t<T> mean, compute_t<T> rstd,
                                     T* __restrict y, std::int64_t n) {
#pragma omp simd
  for (std::int64_t i = 0; i < n; ++i) y[i] = store<T>((load(x[i]) - mean) * rstd * weight[i] + bias[i]);
}

template <class T>
BONFIRE_INLINE void layer_norm_loop(const LayerNormForward<T>& a, std::int64_t begin, std::int64_t end) {
  using C = compute_t<T>;
  const std::int64_t n = a.columns;
  for (std::int64_t row = begin; row < end; ++row) {
    const T* __restrict x = a.x + row * n;
    C sum = 0, squares = 0;
#pragma omp simd reduction(+ : sum)
    for (std::int64_t i = 0; i < n; ++i) sum += load(x[i]);
    const C mean = sum / static_cast<C>(n);
    // About the mean, because a difference of two large sums would lose what is asked for.
#pragma omp simd reduction(+ : squares)
    for (std::int64_t i = 0; i < n; ++i) squares += (load(x[i]) - mean) * (load(x[i]) - mean);
    const C rstd = C(1) / std::sqrt(squares / static_cast<C>(n) + static_cast<C>(a.eps));
    a.mean[row] = mean;
    a.rstd[row] = rstd;
    write_layer_norm<T>(x, a.weight, a.bias, mean, rstd, a.y + row * n, n);
  }
}

template <class T>
BONFIRE_INLINE void layer_norm_backward_loop(const LayerNormBackward<T>& a, const LayerNormSums<compute_t<T>>& to,
                                             std::int64_t begin, std::int64_t end) {
  using C = compute_t<T>;
  const std::int64_t n = a.columns;
  const C* __restrict weight = a.weight;
  C* __restrict dw = to.weight, * __restrict db = to.bias, * __restrict dx_sums = to.dx;
  for (std::int64_t row = begin; row < end; ++row) {
    const T* __restrict dy = a.dy + row * n, * __restrict x = a.x + row * n;
    T* __restrict dx = a.dx + row * n;
    const C mean = a.mean[row], rstd = a.rstd[row];
    C sum = 0, dot = 0;
#pragma omp simd reduction(+ : sum, dot)
    for (std::int64_t i = 0; i < n; ++i) {
      const C scaled = (load(x[i]) - mean) * rstd, d = load(dy[i]), weighted = d * weight[i];
      sum += weighted;
      dot += weighted * scaled;
      dw[i] += d * scaled;
      db[i] += d;
    }
    const C of_sum = sum / static_cast<C>(n), of_dot = dot / static_cast<C>(n);
    const auto gradient = [&](std::int64_t i) __attribute__((always_inline)) {
      const C scaled = (load(x[i]) - mean) * rstd;
      return rstd * (load(dy[i]) * weight[i] - of_sum - scaled * of_dot);
    };
    if (a.d_stream) {
      const T* __restrict d_stream = a.d_stream + row * n;
#pragma omp simd
      for (std::int64_t i = 0; i < n; ++i) dx[i] = store<T>(load(d_stream[i]) + gradient(i));
    } else {
#pragma omp simd
      for (std::int64_t i = 0; i < n; ++i) dx[i] = store<T>(gradient(i));
    }
    if (dx_sums)
#pragma omp simd
      for (std::int64_t i = 0; i < n; ++i) dx_sums[i] += load(dx[i]);
    if (a.normed) write_layer_norm<T>(x, weight, a.bias, mean, rstd, a.normed + row * n, n);
  }
}

#define BONFIRE_LAYER_NORM_KERNELS(T)                                                                                \
  BONFIRE_CLONES void layer_norm_rows(const LayerNormForward<T>& a, std::int64_t begin, std::int64_t end) {          \
    layer_norm_loop<T>(a, begin, end);                                                                               \
  }                                                                                                                  \
  BONFIRE_CLONES void layer_norm_backward_rows(const LayerNormBackward<T>& a, const LayerNormSums<compute_t<T>>& to, \
                                               std::int64_t begin, std::int64_t end) {                               \
    layer_norm_backward_loop<T>(a, to, begin, end);                                                                  \
  }

BONFIRE_LAYER_NORM_KERNELS(float)
BONFIRE_LAYER_NORM_KERNELS(double)
BONFIRE_LAYER_NORM_KERNELS(c10::BFloat16)
BONFIRE_LAYER_NORM_KERNELS(c10::Half)

ThreeTensors layer_norm_cpu(const Tensor& given, const Tensor& given_weight, const Tensor& given_bias, double eps) {
  const auto wide = statistics_type(given);
  const Tensor x = given.contiguous(), weight = given_weight.to(wide).contiguous(), bias = given_bias.to(wide).contiguous();
  const std::int64_t columns = x.size(-1), rows = columns ? x.numel() / columns : 0;
  Tensor y = at::empty_like(x), mean = at::empty({rows}, x.options().dtype(wide)), rstd = at::empty_like(mean);
  cpu::dispatch_floating(x.scalar_type(), "layer_norm", [&](auto t) {
    using T = decltype(t);
    using C = compute_t<T>;
    const LayerNormForward<T> arguments{.x = x.const_data_ptr<T>(),
                                        .weight = weight.const_data_ptr<C>(),
                                        .bias = bias.const_data_ptr<C>(),
                                        .y = y.data_ptr<T>(),
                                        .mean = mean.data_ptr<C>(),
                                        .rstd = rstd.data_ptr<C>(),
                                        .columns = columns,
                                        .eps = eps};
    at::parallel_for(0, rows, cpu::grain(columns),
                     [&](std::int64_t begin, std::int64_t end) { layer_norm_rows(arguments, begin, end); });
  });
  return {y, mean, rstd};
}

FiveTensors layer_norm_backward_cpu(const Tensor& d_normed, const OptionalTensor& d_stream, const Tensor& given,
                                    const Tensor& given_weight, const Tensor& mean, const Tensor& rstd,
                                    const OptionalTensor& given_bias, bool sums) {
  const auto wide = statistics_type(given);
  const bool again = given_bias.has_value();
  const Tensor x = given.contiguous(), weight = given_weight.to(wide).contiguous();
  const Tensor dy = d_normed.contiguous(), ds = d_stream ? d_stream->contiguous() : Tensor();
  const Tensor bias = again ? given_bias->to(wide).contiguous() : Tensor();
  const std::int64_t columns = x.size(-1), rows = columns ? x.numel() / columns : 0, parts = parts_of(rows);
  Tensor dx = at::empty_like(x), normed = room_for_norm(x, again);
  Tensor found = at::zeros({parts, sums ? 3 : 2, columns}, rstd.options());
  cpu::dispatch_floating(x.scalar_type(), "layer_norm_backward", [&](auto t) {
    using T = decltype(t);
    using C = compute_t<T>;
    const LayerNormBackward<T> arguments{.dy = dy.const_data_ptr<T>(),
                                         .d_stream = ds.defined() ? ds.const_data_ptr<T>() : nullptr,
                                         .x = x.const_data_ptr<T>(),
                                         .weight = weight.const_data_ptr<C>(),
                                         .bias = again ? bias.const_data_ptr<C>() : nullptr,
                                         .mean = mean.const_data_ptr<C>(),
                                         .rstd = rstd.const_data_ptr<C>(),
                                         .dx = dx.data_ptr<T>(),
                                         .normed = again ? normed.data_ptr<T>() : nullptr,
                                         .columns = columns};
    auto* to = found.data_ptr<C>();
    at::parallel_for(0, parts, 1, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t part = begin; part < end; ++part) {
        C* own = to + part * found.stride(0);
        layer_norm_backward_rows(arguments, {.weight = own, .bias = own + columns, .dx = sums ? own + 2 * columns : nullptr},
                                 part * kRowsPerPart, std::min(rows, (part + 1) * kRowsPerPart));
      }
    });
  });
  const Tensor all = parts == 1 ? found[0] : found.sum(0);
  return {dx, all[0], all[1], normed, sums ? all[2] : at::empty({0}, rstd.options())};
}

TORCH_LIBRARY_IMPL(bonfire, CPU, m) {
  m.impl("rms_norm", rms_norm_cpu);
  m.impl("rms_norm_backward", rms_norm_backward_cpu);
  m.impl("layer_norm", layer_norm_cpu);
  m.impl("layer_norm_backward", layer_norm_backward_cpu);
}

}  // namespace
}  // namespace bonfire
