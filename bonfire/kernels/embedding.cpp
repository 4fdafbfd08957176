#include "bonfire/kernels/embedding.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "bonfire/base/error.h"
#include "bonfire/kernels/backward_node.h"
#include "bonfire/kernels/operator.h"
#include "bonfire/kernels/vectorize.h"

namespace bonfire {
namespace {

using at::Tensor;
using cpu::compute_t;
using cpu::load;
using cpu::store;

template <class O, class T>
BONFIRE_INLINE void add_loop(O* __restrict out, const T* __restrict row, std::int64_t n) {
#pragma omp simd
  for (std::int64_t i = 0; i < n; ++i) out[i] = store<O>(load(out[i]) + static_cast<compute_t<O>>(load(row[i])));
}

#define BONFIRE_ADD_KERNEL(O, T) \
  BONFIRE_CLONES void add_row(O* out, const T* row, std::int64_t n) { add_loop(out, row, n); }
BONFIRE_ADD_KERNEL(float, float)
BONFIRE_ADD_KERNEL(double, double)
BONFIRE_ADD_KERNEL(c10::BFloat16, c10::BFloat16)
BONFIRE_ADD_KERNEL(c10::Half, c10::Half)
BONFIRE_ADD_KERNEL(float, c10::BFloat16)
BONFIRE_ADD_KERNEL(float, c10::Half)

template <class O, class T>
void add_rows(const Tensor& out, const Tensor& tokens, const Tensor& gradient) {
  O* to = out.data_ptr<O>();
  const T* from = gradient.const_data_ptr<T>();
  const auto* token = tokens.const_data_ptr<std::int64_t>();
  const std::int64_t rows = tokens.numel(), n = out.size(1);
  // Threads share the columns, so each of them sees every token in order.
  at::parallel_for(0, n, std::max<std::int64_t>(16, 65536 / std::max<std::int64_t>(1, rows)),
                   [&](std::int64_t begin, std::int64_t end) {
                     for (std::int64_t row = 0; row < rows; ++row)
                       add_row(to + token[row] * n + begin, from + row * n + begin, end - begin);
                   });
}

void embedding_add_cpu(Tensor out, const Tensor& tokens, const Tensor& given) {
  const Tensor gradient = given.contiguous();
  cpu::dispatch_floating(gradient.scalar_type(), "embedding_add_", [&](auto t) {
    using T = decltype(t);
    if (out.scalar_type() == gradient.scalar_type()) {
      add_rows<T, T>(out, tokens, gradient);
    } else if constexpr (sizeof(T) == 2) {
      require(out.scalar_type() == at::kFloat, "embedding_add_: {} rows cannot be added to {}",
              c10::toString(gradient.scalar_type()), c10::toString(out.scalar_type()));
      add_rows<float, T>(out, tokens, gradient);
    } else {
      fail("embedding_add_: {} rows cannot be added to {}", c10::toString(gradient.scalar_type()),
           c10::toString(out.scalar_type()));
    }
  });
}

// index_put_ sorts, so its order is fixed on every device.
void embedding_add_composite(Tensor out, const Tensor& tokens, const Tensor& gradient) {
  out.index_put_({tokens}, gradient.to(out.scalar_type()), true);
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
