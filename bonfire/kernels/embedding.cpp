#include "bonfire/kernels/embedding.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "bonfire/base/error.h"
#include "bonfire/kernels/argument.h"
#include "bonfire/kernels/backward_node.h"
#include "bonfire/kernels/operator.h"
#include "bonfire/kernels/vectorize.h"

namespace bonfire {
namespace {

using at::Tensor;
using cpu::compute_t;
using cpu::load;
using cpu::store;

template <class C, class T>
BONFIRE_INLINE void sum_loop(C* __restrict sum, const T* __restrict row, std::int64_t n) {
#pragma omp simd
  for (std::int64_t i = 0; i < n; ++i) sum[i] += static_cast<C>(load(row[i]));
}
template <class O>
BONFIRE_INLINE void add_loop(O* __restrict out, const compute_t<O>* __restrict sum, std::int64_t n) {
#pragma omp simd
  for (std::int64_t i = 0; i < n; ++i) out[i] = store<O>(load(out[i]) + sum[i]);
}

#define BONFIRE_SUM_KERNEL(C, T) \
  BONFIRE_CLONES void sum_row(C* sum, const T* row, std::int64_t n) { sum_loop(sum, row, n); }
BONFIRE_SUM_KERNEL(float, float)
BONFIRE_SUM_KERNEL(float, c10::BFloat16)
BONFIRE_SUM_KERNEL(float, c10::Half)
BONFIRE_SUM_KERNEL(double, double)
#define BONFIRE_ADD_KERNEL(O) \
  BONFIRE_CLONES void add_row(O* out, const compute_t<O>* sum, std::int64_t n) { add_loop(out, sum, n); }
BONFIRE_ADD_KERNEL(float)
BONFIRE_ADD_KERNEL(double)
BONFIRE_ADD_KERNEL(c10::BFloat16)
BONFIRE_ADD_KERNEL(c10::Half)

// Where a token is, in the order in which it comes: positions [begin, end) of the order.
struct Run {
  std::int64_t token, begin, end;
};

template <class O, class T>
void add_rows(const Tensor& out, const Tensor& tokens, const Tensor& gradient) {
  O* to = out.data_ptr<O>();
  const T* from = gradient.const_data_ptr<T>();
  const auto* token = tokens.const_data_ptr<std::int64_t>();
  const std::int64_t rows = tokens.numel(), n = out.size(1);
  std::vector<std::int64_t> order(static_cast<std::size_t>(rows));
  std::iota(order.begin(), order.end(), std::int64_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::int64_t a, std::int64_t b) { return token[a] < token[b]; });
  std::vector<Run> runs;
  for (std::int64_t at = 0; at < rows; ++at) {
    const std::int64_t found = token[order[static_cast<std::size_t>(at)]];
    if (runs.empty() || runs.back().token != found) runs.push_back({found, at, at});
    runs.back().end = at + 1;
  }
  // Threads share the columns, so one token that is everywhere makes nobody wait.
  at::parallel_for(0, n, std::max<std::int64_t>(16, 65536 / std::max<std::int64_t>(1, rows)),
                   [&](std::int64_t begin, std::int64_t end) {
                     std::vector<compute_t<O>> sum(static_cast<std::size_t>(end - begin));
                     for (const Run& run : runs) {
                       std::fill(sum.begin(), sum.end(), compute_t<O>(0));
                       for (std::int64_t at = run.begin; at < run.end; ++at)
                         sum_row(sum.data(), from + order[static_cast<std::size_t>(at)] * n + begin, end - begin);
                       add_row(to + run.token * n + begin, sum.data(), end - begin);
                     }
                   });
}

void embedding_add_cpu(Tensor out, const Tensor& tokens, const Tensor& given) {
  const Tensor gradient = given.contiguous();
  const auto refuse = [&] {
    fail("embedding_add_: {} rows cannot be added to {}", c10::toString(gradient.scalar_type()),
         c10::toString(out.scalar_type()));
  };
  cpu::dispatch_floating(gradient.scalar_type(), "embedding_add_", [&](auto t) {
    using T = decltype(t);
    if (out.scalar_type() == gradient.scalar_type()) {
      add_rows<T, T>(out, tokens, gradient);
    } else if constexpr (sizeof(T) == 2) {
      if (out.scalar_type() != at::kFloat) refuse();
      add_rows<float, T>(out, tokens, gradient);
    } else {
      refuse();
    }
  });
}

// index_put_ sorts, so its order is fixed on every device.
void embedding_add_composite(Tensor out, const Tensor& tokens, const Tensor& gradient) {
  if (out.element_size() > 2) {
    out.index_put_({tokens}, gradient.to(out.scalar_type()), true);
    return;
  }
  // Added up before they are rounded.
  const Tensor sum = at::zeros(out.sizes(), out.options().dtype(at::kFloat));
  sum.index_put_({tokens}, gradient.to(at::kFloat), true);
  out.add_(sum);
}

struct EmbeddingNode : BackwardNode {
  std::shared_ptr<GradientSink> sink;
  std::vector<std::int64_t> sizes;  // of the weight
  at::TensorOptions options;

  torch::autograd::variable_list backward(const torch::autograd::variable_list& gradients) override {
    const Tensor tokens = saved(0);
    bool fresh = false;
    Tensor out = sink ? sink->buffer(fresh) : at::zeros(sizes, options);
    if (fresh) out.zero_();
    const Tensor rows = gradients[0].reshape({-1, sizes[1]});
    // Into a narrower buffer all rows are added up first, so that the sum is rounded once.
    const bool narrow = out.element_size() < rows.element_size();
    const Tensor sum = narrow ? at::zeros(sizes, rows.options()) : out;
    BONFIRE_OPERATOR("bonfire::embedding_add_", void(Tensor, const Tensor&, const Tensor&)).call(sum, tokens, rows);
    if (narrow) out.add_(sum);
    if (!sink) return {out};
    sink->arrived();
    return {Tensor()};
  }
};

}  // namespace

Tensor embedding(const Tensor& weight, const Tensor& tokens, const std::shared_ptr<GradientSink>& weight_sink) {
  require_integers({"embedding", "tokens", tokens});
  require_sizes({"embedding", "weight", weight}, {any_size, any_size}, tokens);
  auto sizes = tokens.sizes().vec();
  sizes.push_back(weight.size(1));
  auto node = make_node<EmbeddingNode>(weight);
  Tensor out, flat;
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    flat = tokens.to(at::kLong).reshape({-1}).contiguous();
    if (flat.is_cpu()) {
      const auto* token = flat.const_data_ptr<std::int64_t>();
      for (std::int64_t i = 0; i < flat.numel(); ++i)
        require(token[i] >= 0 && token[i] < weight.size(0), "embedding: token {} is {}; allowed: 0 to {}", i, token[i],
                weight.size(0) - 1);
    }
    out = at::index_select(weight, 0, flat).view(sizes);
  }
  if (!node) return out;
  node->save(flat);
  node->sink = weight_sink;
  node->sizes = weight.sizes().vec();
  node->options = weight.options().requires_grad(false);
  torch::autograd::set_history(out, node);
  return out;
}

TORCH_LIBRARY_IMPL(bonfire, CPU, m) { m.impl("embedding_add_", embedding_add_cpu); }
TORCH_LIBRARY_IMPL(bonfire, CompositeExplicitAutograd, m) { m.impl("embedding_add_", embedding_add_composite); }

}  // namespace bonfire
