#include "bonfire/kernels/product.h"

#include <algorithm>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <torch/library.h>

#include "bonfire/kernels/argument.h"
#include "bonfire/kernels/fp8.h"
#include "bonfire/kernels/gemm.h"
#include "bonfire/kernels/known_sums.h"
#include "bonfire/kernels/operator.h"

namespace bonfire {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

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

Tensor product_composite(const Tensor& a, const Tensor& b, const OptionalTensor& bias, const OptionalTensor& residual) {
  if (!residual) return bias ? at::addmm(*bias, a, b) : at::mm(a, b);
  const Tensor out = at::addmm(*residual, a, b);
  return bias ? out.add(*bias) : out;
}

Tensor product_cpu(const Tensor& a, const Tensor& b, const OptionalTensor& bias, const OptionalTensor& residual) {
  const auto suits = [](const OptionalTensor& x) { return !x || is_dense_float(*x); };
  if (!suits_own_gemm(a, b) || !suits(bias) || !suits(residual)) return product_composite(a, b, bias, residual);
  Tensor out = at::empty({a.size(0), b.size(1)}, a.options());
  own_gemm(out, a, b, residual ? *residual : bias ? *bias : Tensor());
  return residual && bias ? out.add_(*bias) : out;
}

// Torch's products are of one type, and would round the sum to that of a and b: these are widened instead, some of the depth
// at a time, so that the copies stay small.
void widened_product_into(const Tensor& out, const Tensor& a, const Tensor& b, bool accumulate) {
  constexpr std::int64_t most_elements = std::int64_t{1} << 18;
  if (!accumulate) out.zero_();
  const std::int64_t depth = a.size(1), at_once = std::max<std::int64_t>(16, most_elements / (a.size(0) + b.size(1) + 1));
  for (std::int64_t begin = 0; begin < depth; begin += at_once) {
    const std::int64_t some = std::min(at_once, depth - begin);
    product_into(out, a.narrow(1, begin, some).to(out.scalar_type()), b.narrow(0, begin, some).to(out.scalar_type()),
                 Writing::add);
  }
}

void product_into_composite(Tensor out, const Tensor& a, const Tensor& b, bool accumulate) {
  if (out.scalar_type() != a.scalar_type())
    widened_product_into(out, a, b, accumulate);
  else if (accumulate)
    out.addmm_(a, b);
  else
    at::mm_out(out, a, b);
}

void product_into_cpu(Tensor out, const Tensor& a, const Tensor& b, bool accumulate) {
  if (is_dense_float(out) && suits_own_gemm(a, b))
    own_gemm(out, a, b, accumulate ? out : Tensor());
  else
    product_into_composite(out, a, b, accumulate);
}

Tensor plain_weight(const Fp8Product* fp8, const Tensor& weight, const Tensor& beside) {
  return fp8 ? fp8->plain(weight, beside.scalar_type()) : weight;
}

struct LinearNode : ProductNode {
  std::vector<std::int64_t> sizes;  // of x
  std::shared_ptr<GradientSink> weight_sink, bias_sink;
  std::shared_ptr<Fp8Product> fp8, reader;  // null: of products without fp8; of weights that are not in eight bits
  at::ScalarType bias_type = at::kFloat;
  bool with_bias = false, with_residual = false;

  std::vector<std::size_t> parameters() const override {
    return with_bias ? std::vector<std::size_t>{1, 2} : std::vector<std::size_t>{1};
  }

  torch::autograd::variable_list backward(const torch::autograd::variable_list& gradients) override {
    const Tensor x = saved(0), weight = saved(1);
    const Tensor dy = gradients[0].reshape({-1, weight.size(0)});
    torch::autograd::variable_list out(num_outputs());
    const bool wanted = task_should_compute_output(0) || wants(1);
    const Quantized eight = fp8 && wanted ? fp8->gradient(dy) : Quantized();
    // The input's gradient first: what waits for it can be further away than what waits for the weight's.
    if (task_should_compute_output(0))
      out[0] =
          (fp8 ? fp8->input_gradient(eight, dy.scalar_type(), weight) : product(dy, plain_weight(reader.get(), weight, dy)))
              .view(sizes);
    if (wants(1))
      give(out, 1, [fp8 = fp8, sink = weight_sink, eight, dy, x = for_later(x), type = weight.scalar_type()] {
        const WeightGradientOptions options{.sink = sink.get(), .type = type};
        return fp8 ? fp8->weight_gradient(eight, dy, {}, x, options) : weight_gradient(dy, x, options);
      });
    if (with_bias && wants(2))
      give(out, 2, [sink = bias_sink, dy, sums = handed_over(gradients[0]), type = bias_type] {
        return parameter_gradient(sink, sums.defined() ? sums : column_sums(dy), type);
      });
    if (with_residual) out.back() = gradients[0];
    return out;
  }
};

}  // namespace

Tensor product(const Tensor& a, const Tensor& b, const Addends& addends) {
  require_sizes({"product", "a", a}, {any_size, any_size}, a);
  require_sizes({"product", "b", b}, {a.size(1), any_size}, a);
  if (addends.bias.defined()) require_sizes({"product", "bias", addends.bias}, {b.size(1)}, b);
  if (addends.residual.defined()) require_sizes({"product", "residual", addends.residual}, {a.size(0), b.size(1)}, b);
  const auto optional = [](const Tensor& x) { return x.defined() ? OptionalTensor(x) : std::nullopt; };
  return BONFIRE_OPERATOR("bonfire::product",
                          Tensor(const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&))
      .call(a, b, optional(addends.bias), optional(addends.residual));
}

void product_into(const Tensor& out, const Tensor& a, const Tensor& b, Writing writing) {
  require_sizes({"product_into", "a", a}, {any_size, any_size}, a);
  require_sizes({"product_into", "b", b}, {a.size(1), any_size}, a);
  require_sizes({"product_into", "out", out}, {a.size(0), b.size(1)}, a);
  BONFIRE_OPERATOR("bonfire::product_into_", void(Tensor, const Tensor&, const Tensor&, bool))
      .call(out, a, b, writing == Writing::add);
}

Tensor column_sums(const Tensor& x) {
  require_sizes({"column_sums", "x", x}, {any_size, any_size}, x);
  return BONFIRE_OPERATOR("bonfire::column_sums", Tensor(const Tensor&)).call(x);
}

Tensor weight_gradient(const Tensor& dy, const Tensor& x, const WeightGradientOptions& options) {
  if (!options.sink) return product(dy.t(), x).to(options.type);
  bool fresh = false;
  const Tensor buffer = options.sink->buffer(fresh);
  product_into(buffer, dy.t(), x, fresh ? Writing::overwrite : Writing::add);
  options.sink->arrived();
  return {};
}

Tensor linear(const Tensor& x, const Tensor& weight, const LinearOptions& options) {
  require_rows({"linear", "x", x});
  require_sizes({"linear", "weight", weight}, {any_size, x.size(-1)}, x);
  auto sizes = x.sizes().vec();
  sizes.back() = weight.size(0);
  const bool with_bias = options.bias.defined(), with_residual = options.residual.defined();
  if (with_bias) require_sizes({"linear", "bias", options.bias}, {weight.size(0)}, x);
  if (with_residual) require_sizes({"linear", "residual", options.residual}, sizes, x);
  std::shared_ptr<LinearNode> node;
  if (with_bias && with_residual)
    node = make_node<LinearNode>(x, weight, options.bias, options.residual);
  else if (with_bias)
    node = make_node<LinearNode>(x, weight, options.bias);
  else if (with_residual)
    node = make_node<LinearNode>(x, weight, options.residual);
  else
    node = make_node<LinearNode>(x, weight);

  Tensor out, rows;
  bool in_fp8 = false;
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    rows = x.reshape({-1, weight.size(1)});
    const Addends addends{.bias = options.bias,
                          .residual = with_residual ? options.residual.reshape({-1, weight.size(0)}) : Tensor()};
    in_fp8 = options.fp8 && Fp8Product::suits(rows, weight);
    out = in_fp8 ? options.fp8->forward(rows, weight, addends, false).out
                 : product(rows, plain_weight(options.fp8.get(), weight, rows).t(), addends);
    out = out.view(sizes);
  }
  if (!node) return out;
  if (in_fp8) node->fp8 = options.fp8;
  node->reader = options.fp8;
  // For the weight's gradient alone.
  node->save(!weight.requires_grad() ? Tensor() : rows.is_same(x) ? x : rows.tensor_data());
  node->save(weight);
  node->sizes = x.sizes().vec();
  node->weight_sink = options.weight_sink;
  node->bias_sink = options.bias_sink;
  node->with_bias = with_bias;
  node->expect_sums(options.bias);
  node->with_residual = with_residual;
  if (with_bias) node->bias_type = options.bias.scalar_type();
  torch::autograd::set_history(out, node);
  return out;
}

TORCH_LIBRARY_IMPL(bonfire, CPU, m) {
  m.impl("product", product_cpu);
  m.impl("product_into_", product_into_cpu);
}

TORCH_LIBRARY_IMPL(bonfire, CompositeExplicitAutograd, m) {
  m.impl("product", product_composite);
  m.impl("product_into_", product_into_composite);
}

}  // namespace bonfire
