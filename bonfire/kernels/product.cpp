#include "bonfire/kernels/product.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>

#include "bonfire/base/error.h"
#include "bonfire/kernels/backward_node.h"
#include "bonfire/kernels/gemm.h"

namespace bonfire {
namespace {

using at::Tensor;

bool is_dense_float(const Tensor& x) { return x.is_cpu() && x.scalar_type() == at::kFloat && x.stride(-1) == 1; }

bool suits_own_gemm(const Tensor& a, const Tensor& b) {
  const auto suits = [](const Tensor& x) {
    return x.is_cpu() && x.scalar_type() == at::kFloat && (x.stride(0) == 1 || x.stride(1) == 1);
  };
  return cpu::prefers_own_gemm() && suits(a) && suits(b) && a.size(1) > 0;
}

// out = a b + addend; the addend may be `out`.
void own_gemm(const Tensor& out, const Tensor& a, const Tensor& b, const Tensor& addend) {
  cpu::multiply({.rows = a.size(0),
                 .columns = b.size(1),
                 .depth = a.size(1),
                 .a = a.const_data_ptr<float>(),
                 .a_row = a.stride(0),
                 .a_column = a.stride(1),
                 .b = b.const_data_ptr<float>(),
                 .b_row = b.stride(0),
                 .b_column = b.stride(1),
                 .c = out.data_ptr<float>(),
                 .c_row = out.stride(0),
                 .addend = addend.defined() ? addend.const_data_ptr<float>() : nullptr,
                 .addend_row = addend.defined() && addend.dim() == 2 ? addend.stride(0) : 0});
}

struct LinearNode : BackwardNode {
  std::vector<std::int64_t> sizes;  // of x
  std::shared_ptr<GradientSink> weight_sink, bias_sink;
  at::ScalarType bias_type = at::kFloat;
  bool with_bias = false, with_residual = false;

  torch::autograd::variable_list backward(const torch::autograd::variable_list& gradients) override {
    const Tensor x = saved(0), weight = saved(1);
    const Tensor dy = gradients[0].reshape({-1, weight.size(0)});
    torch::autograd::variable_list out(num_outputs());
    // The input's gradient first: what waits for it can be further away than what waits for the weight's.
    if (task_should_compute_output(0)) out[0] = product(dy, weight).view(sizes);
    if (task_should_compute_output(1))
      out[1] = weight_gradient(dy, x, {.sink = weight_sink.get(), .type = weight.scalar_type()});
    if (with_bias && task_should_compute_output(2)) {
      const Tensor d_bias = dy.sum(0);
      if (bias_sink)
        deliver(*bias_sink, d_bias);
      else
        out[2] = d_bias.to(bias_type);
    }
    if (with_residual) out.back() = gradients[0];
    return out;
  }
};

}  // namespace

Tensor product(const Tensor& a, const Tensor& b, const Tensor& addend) {
  if (suits_own_gemm(a, b) && (!addend.defined() || is_dense_float(addend))) {
    Tensor out = at::empty({a.size(0), b.size(1)}, a.options());
    own_gemm(out, a, b, addend);
    return out;
  }
  return addend.defined() ? at::addmm(addend, a, b) : at::mm(a, b);
}

Tensor weight_gradient(const Tensor& dy, const Tensor& x, const WeightGradientOptions& options) {
  if (!options.sink) return product(dy.t(), x).to(options.type);
  bool fresh = false;
  Tensor buffer = options.sink->buffer(fresh);
  if (buffer.scalar_type() != dy.scalar_type()) {
    const Tensor gradient = product(dy.t(), x);
    if (fresh)
      buffer.copy_(gradient);
    else
      buffer.add_(gradient);
  } else if (is_dense_float(buffer) && suits_own_gemm(dy.t(), x)) {
    own_gemm(buffer, dy.t(), x, fresh ? Tensor() : buffer);
  } else if (fresh) {
    at::mm_out(buffer, dy.t(), x);
  } else {
    buffer.addmm_(dy.t(), x);
  }
  options.sink->arrived();
  return {};
}

Tensor linear(const Tensor& x, const Tensor& weight, const LinearOptions& options) {
  require(weight.dim() == 2 && x.dim() >= 1 && x.size(-1) == weight.size(1),
          "linear: the last dimension of the input is {}; the weight expects {}", x.dim() ? x.size(-1) : 0,
          weight.dim() == 2 ? weight.size(1) : 0);
  const bool with_bias = options.bias.defined(), with_residual = options.residual.defined();
  std::shared_ptr<LinearNode> node;
  if (with_bias && with_residual)
    node = make_node<LinearNode>(x, weight, options.bias, options.residual);
  else if (with_bias)
    node = make_node<LinearNode>(x, weight, options.bias);
  else if (with_residual)
    node = make_node<LinearNode>(x, weight, options.residual);
  else
    node = make_node<LinearNode>(x, weight);

  auto sizes = x.sizes().vec();
  sizes.back() = weight.size(0);
  Tensor out, rows;
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    rows = x.reshape({-1, weight.size(1)});
    if (with_residual) {
      out = product(rows, weight.t(), options.residual.reshape({-1, weight.size(0)}));
      if (with_bias) out.add_(options.bias);
    } else if (with_bias) {
      out = product(rows, weight.t(), options.bias);
    } else {
      out = product(rows, weight.t());
    }
    out = out.view(sizes);
  }
  if (!node) return out;
  node->save(rows.is_same(x) ? x : rows.tensor_data());
  node->save(weight);
  node->sizes = x.sizes().vec();
  node->weight_sink = options.weight_sink;
  node->bias_sink = options.bias_sink;
  node->with_bias = with_bias;
  node->with_residual = with_residual;
  if (with_bias) node->bias_type = options.bias.scalar_type();
  torch::autograd::set_history(out, node);
  return out;
}

}  // namespace bonfire
