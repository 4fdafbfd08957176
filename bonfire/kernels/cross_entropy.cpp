#include "bonfire/kernels/cross_entropy.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/log_softmax.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/where.h>
#include <torch/library.h>

#include "bonfire/base/error.h"
#include "bonfire/kernels/argument.h"
#include "bonfire/kernels/backward_node.h"
#include "bonfire/kernels/operator.h"
#include "bonfire/kernels/product.h"
#include "bonfire/kernels/vectorize.h"

namespace bonfire {
namespace {

using at::Tensor;
using cpu::compute_t;
using cpu::exponential;
using cpu::load;
using cpu::store;

template <class T>
BONFIRE_INLINE compute_t<T> largest(const T* __restrict row, std::int64_t n) {
  compute_t<T> top = load(row[0]);
#pragma omp simd reduction(max : top)
  for (std::int64_t i = 0; i < n; ++i) {
    const auto x = load(row[i]);
    top = top < x ? x : top;
  }
  return top;
}

template <class T>
BONFIRE_INLINE double loss_loop(const T* __restrict row, std::int64_t target, std::int64_t n) {
  const compute_t<T> top = largest(row, n);
  compute_t<T> sum = 0;
#pragma omp simd reduction(+ : sum)
  for (std::int64_t i = 0; i < n; ++i) sum += exponential(load(row[i]) - top);
  return std::log(static_cast<double>(sum)) + static_cast<double>(top) - static_cast<double>(load(row[target]));
}

// Leaves softmax minus one-hot in the row. Narrow types keep the exponentials rounded and sum them before rounding.
template <class T>
BONFIRE_INLINE double gradient_loop(T* __restrict row, std::int64_t target, std::int64_t n) {
  using C = compute_t<T>;
  const C top = largest(row, n), wanted = load(row[target]);
  C sum = 0;
#pragma omp simd reduction(+ : sum)
  for (std::int64_t i = 0; i < n; ++i) {
    const C e = exponential(load(row[i]) - top);
    row[i] = store<T>(e);
    sum += e;
  }
  const C scale = C(1) / sum;
#pragma omp simd
  for (std::int64_t i = 0; i < n; ++i) row[i] = store<T>(load(row[i]) * scale);
  row[target] = store<T>(exponential(wanted - top) * scale - C(1));
  return std::log(static_cast<double>(sum)) + static_cast<double>(top) - static_cast<double>(wanted);
}

#define BONFIRE_CROSS_ENTROPY_KERNELS(T)                                              \
  BONFIRE_CLONES double loss_row(const T* row, std::int64_t target, std::int64_t n) { \
    return loss_loop<T>(row, target, n);                                              \
  }                                                                                   \
  BONFIRE_CLONES double gradient_row(T* row, std::int64_t target, std::int64_t n) {   \
    return gradient_loop<T>(row, target, n);                                          \
  }
BONFIRE_CROSS_ENTROPY_KERNELS(float)
BONFIRE_CROSS_ENTROPY_KERNELS(double)
BONFIRE_CROSS_ENTROPY_KERNELS(c10::BFloat16)
BONFIRE_CROSS_ENTROPY_KERNELS(c10::Half)

at::ScalarType loss_type(const Tensor& logits) { return logits.scalar_type() == at::kDouble ? at::kDouble : at::kFloat; }

// `logits` is [rows, classes] and contiguous, `target` [rows] and int64.
template <bool gradient>
Tensor rows_cpu(const Tensor& logits, const Tensor& target, std::int64_t ignore) {
  const std::int64_t rows = logits.size(0), n = logits.size(1);
  // In double, because they are added up next.
  Tensor losses = at::empty({rows}, logits.options().dtype(at::kDouble));
  const auto* wanted = target.const_data_ptr<std::int64_t>();
  auto* out = losses.data_ptr<double>();
  for (std::int64_t row = 0; row < rows; ++row)
    require(wanted[row] == ignore || (wanted[row] >= 0 && wanted[row] < n),
            "cross_entropy: target {} is {}; allowed: 0 to {}, and {} to ignore it", row, wanted[row], n - 1, ignore);
  cpu::dispatch_floating(logits.scalar_type(), "cross_entropy", [&](auto t) {
    using T = decltype(t);
    T* data = const_cast<T*>(logits.const_data_ptr<T>());
    at::parallel_for(0, rows, cpu::grain(n), [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t row = begin; row < end; ++row) {
        T* at = data + row * n;
        if (wanted[row] == ignore) {
          out[row] = 0;
          if (gradient) std::fill(at, at + n, T(0));
        } else {
          out[row] = gradient ? gradient_row(at, wanted[row], n) : loss_row(at, wanted[row], n);
        }
      }
    });
  });
  return losses;
}

Tensor losses_cpu(const Tensor& logits, const Tensor& target, std::int64_t ignore) {
  return rows_cpu<false>(logits, target, ignore);
}
Tensor gradients_cpu(Tensor logits, const Tensor& target, std::int64_t ignore) {
  return rows_cpu<true>(logits, target, ignore);
}

// Pieces of rows, because these operators hold several copies of what they work on.
constexpr std::int64_t kPieceElements = std::int64_t{1} << 28;

template <bool gradient>
Tensor rows_composite(Tensor logits, const Tensor& target, std::int64_t ignore) {
  const std::int64_t rows = logits.size(0), n = logits.size(1), piece = std::max<std::int64_t>(1, kPieceElements / n);
  Tensor losses = at::empty({rows}, logits.options().dtype(loss_type(logits)));
  for (std::int64_t begin = 0; begin < rows; begin += piece) {
    const std::int64_t count = std::min(piece, rows - begin);
    const Tensor at = logits.narrow(0, begin, count), wanted = target.narrow(0, begin, count).unsqueeze(1);
    const Tensor kept = wanted.ne(ignore), index = wanted.mul(kept);
    const Tensor logs = at::log_softmax(at, 1, loss_type(logits));
    losses.narrow(0, begin, count).copy_(logs.gather(1, index).neg_().mul_(kept).squeeze(1));
    if (gradient) at.copy_(logs.exp().scatter_add_(1, index, kept.to(logs.scalar_type()).neg_()).mul_(kept));
  }
  return losses;
}

void scaled_into_composite(Tensor out, const Tensor& x, const Tensor& factor) { at::mul_out(out, x, factor); }

Tensor losses_composite(const Tensor& logits, const Tensor& target, std::int64_t ignore) {
  return rows_composite<false>(logits, target, ignore);
}
Tensor gradients_composite(Tensor logits, const Tensor& target, std::int64_t ignore) {
  return rows_composite<true>(logits, target, ignore);
}

using Losses = Tensor(const Tensor&, const Tensor&, std::int64_t);
using Gradients = Tensor(Tensor, const Tensor&, std::int64_t);

struct Loss {
  Tensor value;
  Tensor scale;  // what a row's gradient is multiplied by
};

Loss reduce(const Tensor& losses, const Tensor& target, const CrossEntropyOptions& options, at::ScalarType type) {
  const Tensor sum = losses.sum(0, false, at::kDouble);
  if (!options.mean) return {sum.to(type), Tensor()};
  const Tensor count = target.ne(options.ignore_index).sum().to(at::kDouble);
  // Of no target the mean is no number, as it is torch's, and the gradient 0: rows of zeros times whatever is finite.
  return {sum.div(count).to(type), count.clamp_min(1).reciprocal().to(type)};
}

// What the gradients of a loss are multiplied by.
Tensor factor_of(const Tensor& gradient, const Tensor& scale) { return scale.defined() ? gradient.mul(scale) : gradient; }

void scale_into(const Tensor& out, const Tensor& x, const Tensor& factor) {
  BONFIRE_OPERATOR("bonfire::scaled_into_", void(Tensor, const Tensor&, const Tensor&)).call(out, x, factor);
}
Tensor scaled(const Tensor& x, const Tensor& factor) {
  Tensor out = at::empty_like(x);
  scale_into(out, x, factor);
  return out;
}

struct CrossEntropyNode : BackwardNode {
  std::vector<std::int64_t> sizes;

  torch::autograd::variable_list backward(const torch::autograd::variable_list& gradients) override {
    const Tensor gradient = saved(0), scale = saved(1);
    return {scaled(gradient, factor_of(gradients[0], scale)).view(sizes)};
  }
};

struct LinearCrossEntropyNode : BackwardNode {
  std::vector<std::int64_t> sizes;
  std::shared_ptr<GradientSink> sink;

  std::vector<std::size_t> parameters() const override { return {1}; }

  torch::autograd::variable_list backward(const torch::autograd::variable_list& gradients) override {
    const Tensor gradient = saved(0), scale = saved(1), x = saved(2), weight = saved(3);
    // The factor goes onto the narrow sides of the two products, never over the logits.
    const Tensor factor = factor_of(gradients[0], scale);
    torch::autograd::variable_list out(2);
    if (task_should_compute_output(0)) {
      const Tensor dx = product(gradient, weight);
      scale_into(dx, dx, factor);
      out[0] = dx.view(sizes);
    }
    if (wants(1))
      give(out, 1, [sink = sink, gradient, x = for_later(x), factor, type = weight.scalar_type()] {
        return weight_gradient(gradient, scaled(x, factor), {.sink = sink.get(), .type = type});
      });
    return out;
  }
};

// Where forward has made both gradients, up to the factor.
struct ChunkedNode : BackwardNode {
  std::vector<std::int64_t> sizes;
  std::shared_ptr<GradientSink> sink;
  at::ScalarType weight_type = at::kFloat;

  std::vector<std::size_t> parameters() const override { return {1}; }

  torch::autograd::variable_list backward(const torch::autograd::variable_list& gradients) override {
    const Tensor dx = saved(0), scale = saved(1), d_weight = saved(2);
    const Tensor factor = factor_of(gradients[0], scale);
    torch::autograd::variable_list out(2);
    if (task_should_compute_output(0)) out[0] = scaled(dx, factor).view(sizes);
    if (!wants(1)) return out;
    give(out, 1, [sink = sink, d_weight, factor, type = weight_type]() -> Tensor {
      if (!sink) return d_weight.mul(factor).to(type);
      bool fresh = false;
      Tensor buffer = sink->buffer(fresh);
      if (fresh && buffer.scalar_type() == d_weight.scalar_type())
        scale_into(buffer, d_weight, factor);
      else if (fresh)
        at::mul_out(buffer, d_weight, factor);
      else
        buffer.addcmul_(d_weight, factor);
      sink->arrived();
      return {};
    });
    return out;
  }
};

// One for each of the rows of x, which are about so many classes.
void require_targets(const char* op, const Tensor& target, const Tensor& x, std::int64_t classes) {
  require_integers({op, "target", target});
  require_sizes({op, "target", target}, x.sizes().slice(0, static_cast<std::size_t>(x.dim() - 1)), x);
  require(classes > 0, "{}: there are {} classes; allowed: 1 or more", op, classes);
}

Tensor flat_target(const Tensor& target) { return target.to(at::kLong).reshape({-1}).contiguous(); }

}  // namespace

Tensor cross_entropy(const Tensor& logits, const Tensor& given_target, const CrossEntropyOptions& options) {
  require_rows({"cross_entropy", "logits", logits});
  require_targets("cross_entropy", given_target, logits, logits.size(-1));
  auto node = make_node<CrossEntropyNode>(logits);
  Loss loss;
  Tensor gradient;
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    const Tensor flat = logits.reshape({-1, logits.size(-1)}).contiguous(), target = flat_target(given_target);
    Tensor losses;
    if (node) {
      gradient = flat.clone();
      losses = BONFIRE_OPERATOR("bonfire::cross_entropy_", Gradients).call(gradient, target, options.ignore_index);
    } else {
      losses = BONFIRE_OPERATOR("bonfire::cross_entropy", Losses).call(flat, target, options.ignore_index);
    }
    loss = reduce(losses, target, options, loss_type(logits));
  }
  if (!node) return loss.value;
  node->save(gradient);
  node->save(loss.scale);
  node->sizes = logits.sizes().vec();
  torch::autograd::set_history(loss.value, node);
  return loss.value;
}

namespace {

Tensor whole(const Tensor& x, const Tensor& weight, const Tensor& target, const LinearCrossEntropyOptions& options) {
  auto node = make_node<LinearCrossEntropyNode>(x, weight);
  Loss loss;
  Tensor logits, rows;
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    rows = x.reshape({-1, x.size(-1)});
    logits = product(rows, weight.t());
    const auto ignore = options.loss.ignore_index;
    const Tensor losses = node ? BONFIRE_OPERATOR("bonfire::cross_entropy_", Gradients).call(logits, target, ignore)
                               : BONFIRE_OPERATOR("bonfire::cross_entropy", Losses).call(logits, target, ignore);
    loss = reduce(losses, target, options.loss, loss_type(logits));
  }
  if (!node) return loss.value;
  for (const Tensor& tensor : {logits, loss.scale, rows.tensor_data(), weight}) node->save(tensor);
  node->sizes = x.sizes().vec();
  node->sink = options.weight_sink;
  torch::autograd::set_history(loss.value, node);
  return loss.value;
}

Tensor chunked(const Tensor& x, const Tensor& weight, const Tensor& target, const LinearCrossEntropyOptions& options) {
  auto node = make_node<ChunkedNode>(x, weight);
  const bool needs_x = node && x.requires_grad(), needs_weight = node && weight.requires_grad();
  Loss loss;
  Tensor dx, d_weight;
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    const Tensor rows = x.reshape({-1, x.size(-1)});
    if (needs_x) dx = at::empty(rows.sizes(), rows.options());
    if (needs_weight) d_weight = at::empty(weight.sizes(), weight.options().dtype(loss_type(x)));
    const std::int64_t count = rows.size(0), row_bytes = weight.size(0) * static_cast<std::int64_t>(x.element_size());
    const std::int64_t chunk = rows_of_chunk(count, row_bytes, options.most_logit_bytes);
    const auto ignore = options.loss.ignore_index;
    std::vector<Tensor> losses;
    for (std::int64_t begin = 0; begin < count; begin += chunk) {
      const std::int64_t size = std::min(chunk, count - begin);
      const Tensor part = rows.narrow(0, begin, size), wanted = target.narrow(0, begin, size);
      const Tensor logits = product(part, weight.t());
      losses.push_back(node ? BONFIRE_OPERATOR("bonfire::cross_entropy_", Gradients).call(logits, wanted, ignore)
                            : BONFIRE_OPERATOR("bonfire::cross_entropy", Losses).call(logits, wanted, ignore));
      if (needs_x) product_into(dx.narrow(0, begin, size), logits, weight, Writing::overwrite);
      if (needs_weight) product_into(d_weight, logits.t(), part, begin == 0 ? Writing::overwrite : Writing::add);
    }
    loss = reduce(at::cat(losses), target, options.loss, loss_type(x));
  }
  if (!node) return loss.value;
  for (const Tensor& tensor : {dx, loss.scale, d_weight}) node->save(tensor);
  node->sizes = x.sizes().vec();
  node->sink = options.weight_sink;
  node->weight_type = weight.scalar_type();
  torch::autograd::set_history(loss.value, node);
  return loss.value;
}

}  // namespace

Tensor linear_cross_entropy(const Tensor& x, const Tensor& weight, const Tensor& target,
                            const LinearCrossEntropyOptions& options) {
  require_rows({"linear_cross_entropy", "x", x});
  require_sizes({"linear_cross_entropy", "weight", weight}, {any_size, x.size(-1)}, x);
  require_targets("linear_cross_entropy", target, x, weight.size(0));
  const std::int64_t bytes = target.numel() * weight.size(0) * static_cast<std::int64_t>(x.element_size());
  return (bytes > options.most_logit_bytes ? chunked : whole)(x, weight, flat_target(target), options);
}

TORCH_LIBRARY_IMPL(bonfire, CPU, m) {
  m.impl("cross_entropy", losses_cpu);
  m.impl("cross_entropy_", gradients_cpu);
}

TORCH_LIBRARY_IMPL(bonfire, CompositeExplicitAutograd, m) {
  m.impl("cross_entropy", losses_composite);
  m.impl("cross_entropy_", gradients_composite);
  m.impl("scaled_into_", scaled_into_composite);
}

}  // namespace bonfire
