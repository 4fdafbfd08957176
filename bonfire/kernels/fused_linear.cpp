#include "bonfire/kernels/fused_linear.h"

#include <limits>
#include <utility>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/full.h>

#include "bonfire/base/error.h"
#include "bonfire/kernels/activated_product.h"
#include "bonfire/kernels/argument.h"
#include "bonfire/kernels/fp8.h"
#include "bonfire/kernels/known_sums.h"
#include "bonfire/kernels/quantized_activation.h"

namespace bonfire {
namespace {

using at::Tensor;
using torch::autograd::variable_list;

Tensor as_rows(const Tensor& x) { return x.reshape({-1, x.size(-1)}); }

std::vector<std::int64_t> with_last(const Tensor& x, std::int64_t last) {
  auto sizes = x.sizes().vec();
  sizes.back() = last;
  return sizes;
}

// Of a product that is given `x`, with a weight that reads `in` columns: what comes beside it.
void require_options(const char* op, const Tensor& x, std::int64_t in, const Tensor& weight, const LinearOptions& options) {
  require_sizes({op, "weight", weight}, {any_size, in}, x);
  if (options.bias.defined()) require_sizes({op, "bias", options.bias}, {weight.size(0)}, x);
  if (options.residual.defined()) require_sizes({op, "residual", options.residual}, with_last(x, weight.size(0)), x);
  // Whoever made it may have made it of rows.
  if (options.active.defined()) require_sizes({op, "active", as_rows(options.active)}, {as_rows(x).size(0), in}, x);
}

// A node whose next edges are those inputs that are defined. `undefined` ones keep their place in none of its lists.
template <class Node>
std::shared_ptr<Node> node_behind(const std::vector<Tensor>& inputs) {
  torch::autograd::edge_list edges;
  bool any = false;
  for (const auto& input : inputs) {
    if (!input.defined()) continue;
    any = any || input.requires_grad();
    edges.push_back(torch::autograd::impl::gradient_edge(input));
  }
  if (!any || !at::GradMode::is_enabled()) return nullptr;
  std::shared_ptr<Node> node(new Node(), torch::autograd::deleteNode);
  node->set_next_edges(std::move(edges));
  return node;
}

struct Made {
  Tensor out;
  Quantized kept;  // of x, where asked for and made in fp8
  bool in_fp8 = false;
};
struct How {
  Fp8Product* fp8 = nullptr;
  bool keep = false;
};
Made make_product(const Tensor& x, const Tensor& weight, const Addends& addends, const How& how) {
  if (!how.fp8 || !Fp8Product::suits(x, weight)) {
    const Tensor plain = how.fp8 ? how.fp8->plain(weight, x.scalar_type()) : weight;
    return {.out = product(x, plain.t(), addends), .kept = {}};
  }
  const auto forward = how.fp8->forward(x, weight, addends, how.keep);
  return {.out = forward.out, .kept = forward.x, .in_fp8 = true};
}

struct FusedNode : ProductNode {
  std::shared_ptr<GradientSink> weight_sink, bias_sink;
  std::shared_ptr<KnownSums> wanted;        // of the gradient that it makes
  std::shared_ptr<Fp8Product> fp8, reader;  // null: of products without fp8; of weights that are not in eight bits
  at::ScalarType bias_type = at::kFloat;
  bool with_bias = false;

  void take(const LinearOptions& options, bool in_fp8) {
    if (in_fp8) fp8 = options.fp8;
    reader = options.fp8;
    weight_sink = options.weight_sink;
    bias_sink = options.bias_sink;
    with_bias = options.bias.defined();
    if (with_bias) bias_type = options.bias.scalar_type();
    expect_sums(options.bias);
  }

  // The gradient of the product's result, as it is and, in fp8, as it is multiplied.
  struct Gradient {
    Tensor plain;
    Quantized eight;
  };
  Gradient gradient_of(const Tensor& dy) { return {dy, fp8 ? fp8->gradient(dy) : Quantized()}; }
  Tensor through(const Gradient& dy, const Tensor& weight) {
    if (fp8) return fp8->input_gradient(dy.eight, dy.plain, weight);
    return product(dy.plain, reader ? reader->plain(weight, dy.plain.scalar_type()) : weight);
  }
  // What makes the gradient of the product's weight, and that of its bias, whose sums may be known.
  auto to_weight(const Gradient& dy, const Quantized& kept, const Tensor& x, const Tensor& weight) const {
    return [fp8 = fp8, sink = weight_sink, dy, kept, x = x.defined() ? for_later(x) : x, type = weight.scalar_type()] {
      const WeightGradientOptions options{.sink = sink.get(), .type = type};
      return fp8 ? fp8->weight_gradient(dy.eight, dy.plain, kept, x, options) : weight_gradient(dy.plain, x, options);
    };
  }
  auto to_bias(const Tensor& dy, const Tensor& sums) const {
    return [sink = bias_sink, dy, sums, type = bias_type] {
      return parameter_gradient(sink, sums.defined() ? sums : column_sums(dy), type);
    };
  }
};

// Inputs: x, the norm's weight, its bias if any, the product's weight, its bias if any. Saved: x, those weights, rstd and,
// of a layer norm, bias and mean; last, what was kept of the norm: itself, or itself in eight bits and the scale.
struct NormedLinearNode : FusedNode {
  std::shared_ptr<GradientSink> norm_weight_sink, norm_bias_sink;
  double eps = 0;
  bool centered = false, kept_eight = false, kept = false;

  std::vector<std::size_t> parameters() const override {
    std::vector<std::size_t> all;
    for (std::size_t at = 1; at < next_edges().size(); ++at) all.push_back(at);
    return all;
  }

  variable_list backward(const variable_list& gradients) override {
    variable_list out(num_outputs());
    if (!gradients[0].defined()) {
      out[0] = gradients[1];
      return out;
    }
    const Tensor x = saved(0), norm_weight = saved(1), weight = saved(2), rstd = saved(3);
    const Tensor norm_bias = centered ? saved(4) : Tensor(), mean = centered ? saved(5) : Tensor();
    const std::size_t weight_at = centered ? 3 : 2;
    const bool trains_weight = wants(weight_at);
    const bool needs_norm = task_should_compute_output(0) || wants(1) || (centered && wants(2));
    const bool again = trains_weight && !kept_eight && !kept;
    const bool rounded = known && known->eight.values.defined();
    require(!rounded || known->gradient.is_same(gradients[0]),
            "normed_linear: its result has another reader than the activation that was told its scale");
    const Tensor given = gradients[0].reshape({-1, weight.size(0)});
    const Gradient dy = rounded ? Gradient{given, std::exchange(known->eight, {})} : gradient_of(given);
    Tensor normed;
    if (needs_norm) {
      const auto d = norm_backward(through(dy, weight).view(x.sizes()), gradients[1],
                                   {.x = x,
                                    .weight = norm_weight,
                                    .bias = norm_bias,
                                    .mean = mean,
                                    .rstd = rstd,
                                    .again = again,
                                    .sums = wanted && centered});
      normed = d.normed;
      out[0] = d.x;
      if (d.sums.defined()) *wanted = {.gradient = d.x, .sums = d.sums};
      const auto to_norm = [](const std::shared_ptr<GradientSink>& sink, const Tensor& gradient, const Tensor& parameter) {
        return [sink, gradient, type = parameter.scalar_type()] { return parameter_gradient(sink, gradient, type); };
      };
      if (wants(1)) give(out, 1, to_norm(norm_weight_sink, d.weight, norm_weight));
      if (centered && wants(2)) give(out, 2, to_norm(norm_bias_sink, d.bias, norm_bias));
    } else if (again) {
      normed = norm_forward(x, norm_weight, norm_bias, eps).normed;
    }
    if (trains_weight) {
      const std::size_t at = centered ? 6 : 4;
      if (kept) normed = saved(at);
      give(out, weight_at,
           kept_eight ? to_weight(dy, {.values = {}, .transposed = saved(at), .inverse = saved(at + 1)}, {}, weight)
                      : to_weight(dy, {}, as_rows(normed), weight));
    }
    if (with_bias && wants(weight_at + 1)) give(out, weight_at + 1, to_bias(dy.plain, handed_over(gradients[0])));
    return out;
  }
};

// Inputs: wide, weight, bias if any, residual if any. Saved: wide, weight, and what was kept of the activation: itself, or
// itself in eight bits and the scale.
struct ActivatedLinearNode : FusedNode {
  Activation activation = Activation::swiglu;
  bool with_residual = false, kept_eight = false, kept = false;

  std::vector<std::size_t> parameters() const override {
    return with_bias ? std::vector<std::size_t>{1, 2} : std::vector<std::size_t>{1};
  }

  // Whether what backward makes, and the activation if that is made again, can be rounded where it is made.
  bool rounds_at_once(bool again) const {
    return fp8 && activation == Activation::swiglu && wanted && wanted->fp8 && wanted->fp8->knows_gradient() &&
           (!again || fp8->knows_input());
  }

  // And the activation, where it is to be made again.
  ActivatedProductGradient gradient_of_wide(const Gradient& dy, const Tensor& weight, const Tensor& wide, bool again) {
    if (!reader)
      if (auto made = activated_product_backward(activation,
                                                 {.dy = dy.plain, .weight = weight, .wide = as_rows(wide), .again = again}))
        return *made;
    const Tensor d_activated = through(dy, weight).view(with_last(wide, weight.size(1)));
    const auto d = (again ? activate_exchange : activate_backward)(activation, d_activated, wide);
    return {.d = d, .active = again ? d_activated : Tensor()};
  }

  variable_list backward(const variable_list& gradients) override {
    const Tensor wide = saved(0), weight = saved(1);
    const Gradient dy = gradient_of(gradients[0].reshape({-1, weight.size(0)}));
    variable_list out(num_outputs());
    const bool trains_weight = wants(1), again = trains_weight && !kept_eight && !kept;
    Tensor activated;
    Quantized activated_eight;
    if (task_should_compute_output(0) && rounds_at_once(again)) {
      const auto d = quantized_swiglu_backward(
          through(dy, weight), as_rows(wide),
          {.activated = again ? fp8->next_input() : KnownScale(), .gradient = wanted->fp8->next_gradient()});
      activated_eight = d.activated;
      // Nobody but the product reads it; who does all the same shall see that it is nothing.
      out[0] = at::full({1}, std::numeric_limits<double>::quiet_NaN(), wide.options()).expand(wide.sizes());
      wanted->gradient = out[0];
      wanted->eight = d.d_wide;
    } else if (task_should_compute_output(0)) {
      const auto [d, made_again] = gradient_of_wide(dy, weight, wide, again);
      activated = made_again;
      out[0] = d.wide.view(wide.sizes());
      if (wanted && d.column_sums.defined()) *wanted = {.gradient = out[0], .sums = d.column_sums};
    } else if (again) {
      activated = activate(activation, wide);
    }
    if (trains_weight) {
      if (kept) activated = saved(2);
      if (kept_eight) activated_eight = {.values = {}, .transposed = saved(2), .inverse = saved(3)};
      const bool in_eight = activated_eight.transposed.defined();
      give(out, 1, to_weight(dy, activated_eight, in_eight ? Tensor() : as_rows(activated), weight));
    }
    if (with_bias && wants(2)) give(out, 2, to_bias(dy.plain, handed_over(gradients[0])));
    if (with_residual) out.back() = gradients[0];
    return out;
  }
};

}  // namespace

NormedLinear normed_linear(const Tensor& given, const NormWeights& norm, const Tensor& weight,
                           const LinearOptions& options) {
  require_rows({"normed_linear", "x", given});
  require_sizes({"normed_linear", "the norm's weight", norm.weight}, {given.size(-1)}, given);
  if (norm.bias.defined()) require_sizes({"normed_linear", "the norm's bias", norm.bias}, {given.size(-1)}, given);
  require_options("normed_linear", given, given.size(-1), weight, options);
  require(!options.residual.defined(), "normed_linear: a residual is given; it has none");
  const Tensor x = given.contiguous();
  auto node = node_behind<NormedLinearNode>({x, norm.weight, norm.bias, weight, options.bias});
  NormForward forward;
  NormedLinear out;
  Made made;
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    forward = norm_forward(x, norm.weight, norm.bias, norm.options.eps);
    const Tensor rows = as_rows(forward.normed);
    if (options.activation && !options.fp8)
      if (auto both = activated_product(*options.activation, rows, weight, options.bias)) {
        made.out = both->wide;
        out.active = both->active;
      }
    if (!made.out.defined())
      made = make_product(rows, weight, {.bias = options.bias},
                          {.fp8 = options.fp8.get(), .keep = node && weight.requires_grad()});
    out.out = made.out.view(with_last(x, weight.size(0)));
    out.stream = x.tensor_data();
  }
  if (!node) return out;
  for (const Tensor& tensor : {x, norm.weight, weight, forward.rstd}) node->save(tensor);
  node->centered = norm.bias.defined();
  if (node->centered) {
    node->save(norm.bias);
    node->save(forward.mean);
  }
  node->kept_eight = made.kept.transposed.defined();
  node->kept = !node->kept_eight && options.keep && weight.requires_grad();
  if (node->kept_eight) {
    node->save(made.kept.transposed);
    node->save(made.kept.inverse);
  } else if (node->kept) {
    node->save(forward.normed);
  }
  node->take(options, made.in_fp8);
  node->norm_weight_sink = norm.options.weight_sink;
  node->norm_bias_sink = norm.options.bias_sink;
  node->eps = norm.options.eps;
  node->wanted = sums_wanted(x);
  if (made.in_fp8 && !options.bias.defined() && options.one_reader) {
    node->known = std::make_shared<KnownSums>();
    node->known->fp8 = options.fp8;
  }
  torch::autograd::set_history(out.out, node);
  torch::autograd::set_history(out.stream, node);
  return out;
}

Tensor activated_linear(const Tensor& given, Activation activation, const Tensor& weight, const LinearOptions& options) {
  require_rows({"activated_linear", "wide", given});
  const std::int64_t in =
      activation == Activation::swiglu ? require_halves({"activated_linear", "wide", given}) : given.size(-1);
  require_options("activated_linear", given, in, weight, options);
  const Tensor wide = given.contiguous();
  auto node = node_behind<ActivatedLinearNode>({wide, weight, options.bias, options.residual});
  Tensor out, active;
  Made made;
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    const Tensor residual = options.residual.defined() ? as_rows(options.residual) : Tensor();
    const Addends addends{.bias = options.bias, .residual = residual};
    const How how{.fp8 = options.fp8.get(), .keep = node && options.keep && weight.requires_grad()};
    if (activation == Activation::swiglu && how.fp8 && how.fp8->knows_input() && Fp8Product::suits(as_rows(wide), weight)) {
      made.kept = quantized_swiglu(as_rows(wide), how.fp8->next_input(), how.keep);
      made.out = how.fp8->forward(made.kept, weight, addends, wide.scalar_type());
      made.in_fp8 = true;
    } else {
      active = options.active.defined() ? options.active : activate(activation, wide);
      made = make_product(as_rows(active), weight, addends, how);
    }
    out = made.out.view(with_last(wide, weight.size(0)));
  }
  if (!node) return out;
  node->save(wide);
  node->save(weight);
  node->kept_eight = made.kept.transposed.defined();
  node->kept = !node->kept_eight && options.keep && weight.requires_grad();
  if (node->kept_eight) {
    node->save(made.kept.transposed);
    node->save(made.kept.inverse);
  } else if (node->kept) {
    node->save(active);
  }
  node->take(options, made.in_fp8);
  node->activation = activation;
  node->with_residual = options.residual.defined();
  node->wanted = sums_wanted(wide);
  torch::autograd::set_history(out, node);
  return out;
}

}  // namespace bonfire
