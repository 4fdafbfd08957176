#include "bonfire/kernels/fused_linear.h"

#include <utility>

#include <ATen/core/LegacyTypeDispatch.h>

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

void require_norm(const char* op, const Tensor& x, const NormWeights& norm) {
  require_sizes({op, "the norm's weight", norm.weight}, {x.size(-1)}, x);
  if (norm.bias.defined()) require_sizes({op, "the norm's bias", norm.bias}, {x.size(-1)}, x);
}

// Of a product whose weight reads `in` columns.
struct ProductNames {
  const char *op, *weight, *bias;
};
void require_product(const ProductNames& names, const Tensor& x, std::int64_t in, const Tensor& weight,
                     const LinearOptions& options) {
  require_sizes({names.op, names.weight, weight}, {any_size, in}, x);
  if (options.bias.defined()) require_sizes({names.op, names.bias, options.bias}, {weight.size(0)}, x);
  require(!options.residual.defined(), "{}: the options of its {} have a residual; allowed: none", names.op, names.weight);
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

// The gradient of a product's result, as it is and, in fp8, as it is multiplied.
struct Gradient {
  Tensor plain;  // undefined where nothing but its eight bits was made
  Quantized eight{};
  at::ScalarType type = at::kFloat;
};

// What the backward of a product needs beside tensors.
struct ProductPart {
  std::size_t at = 0;  // of its weight among the inputs; its bias, if any, is the one after it
  std::shared_ptr<GradientSink> weight_sink, bias_sink;
  std::shared_ptr<Fp8Product> fp8, reader;  // null: of products without fp8; of weights that are not in eight bits
  at::ScalarType bias_type = at::kFloat;
  bool with_bias = false;
  bool kept = false, kept_eight = false;  // what it read: itself, or its eight bits

  void take(const LinearOptions& options, const Made& made) {
    if (made.in_fp8) fp8 = options.fp8;
    reader = options.fp8;
    weight_sink = options.weight_sink;
    bias_sink = options.bias_sink;
    with_bias = options.bias.defined();
    if (with_bias) bias_type = options.bias.scalar_type();
  }
  Gradient gradient_of(const Tensor& dy) const {
    return {.plain = dy, .eight = fp8 ? fp8->gradient(dy) : Quantized(), .type = dy.scalar_type()};
  }
  Tensor through(const Gradient& dy, const Tensor& weight) const {
    if (fp8) return fp8->input_gradient(dy.eight, dy.type, weight);
    return product(dy.plain, reader ? reader->plain(weight, dy.type) : weight);
  }
  // What makes the gradient of the product's weight, of what it read, and that of its bias, whose sums may be known.
  auto to_weight(const Gradient& dy, const Quantized& eight, const Tensor& rows, at::ScalarType type) const {
    return [fp8 = fp8, sink = weight_sink, dy, eight, rows, type] {
      const WeightGradientOptions options{.sink = sink.get(), .type = type};
      return fp8 ? fp8->weight_gradient(dy.eight, dy.plain, eight, rows, options) : weight_gradient(dy.plain, rows, options);
    };
  }
  auto to_bias(const Tensor& dy, const Tensor& sums) const {
    return [sink = bias_sink, dy, sums, type = bias_type] {
      return parameter_gradient(sink, sums.defined() ? sums : column_sums(dy), type);
    };
  }
};

// Inputs: x, the norm's weight and bias, those of the product; what is undefined has no place among them.
struct NormedNode : ProductNode {
  struct Saved {
    enum At : std::size_t { x, norm_weight, norm_bias, mean, rstd, weight, kept, kept_inverse, end };
  };

  std::shared_ptr<GradientSink> norm_weight_sink, norm_bias_sink;
  std::shared_ptr<KnownSums> wanted;  // of the gradient of x
  double eps = 0;
  bool has_norm = false, centered = false;
  ProductPart first;

  std::vector<std::size_t> parameters() const override {
    std::vector<std::size_t> all;
    for (std::size_t at = 1; at < next_edges().size(); ++at) all.push_back(at);
    return all;
  }

  struct Forward {
    const Tensor& x;
    const NormWeights& norm;
    const NormForward& normed;
    const Tensor& weight;
    const LinearOptions& options;
    const Made& made;
  };
  void remember(const Forward& forward) {
    const auto& [x, norm, normed, weight, options, made] = forward;
    has_norm = norm.weight.defined();
    centered = norm.bias.defined();
    eps = norm.options.eps;
    norm_weight_sink = norm.options.weight_sink;
    norm_bias_sink = norm.options.bias_sink;
    wanted = sums_wanted(x);
    first.at = 1 + (has_norm ? 1 : 0) + (centered ? 1 : 0);
    first.take(options, made);
    first.kept_eight = made.kept.transposed.defined();
    first.kept = has_norm && !first.kept_eight && options.keep && weight.requires_grad();
    const Tensor of_eight = first.kept_eight ? made.kept.transposed : Tensor();
    const Tensor inverse = first.kept_eight ? made.kept.inverse : Tensor();
    // Where nothing before the product's result has a gradient, nothing of it is read.
    bool read = false;
    for (std::size_t at = 0; at <= first.at + (first.with_bias ? 1 : 0); ++at) read = read || next_edge(at).is_valid();
    for (const Tensor& tensor :
         {x, norm.weight, norm.bias, normed.mean, normed.rstd, weight, first.kept ? normed.normed : of_eight, inverse})
      save(read ? tensor : Tensor());
  }

  bool wants_norm() { return has_norm && (wants(1) || (centered && wants(2))); }
  bool reaches_x() { return task_should_compute_output(0) || wants_norm(); }
  // Whether anything before the product's result has a gradient.
  bool reaches_first() { return reaches_x() || wants(first.at) || (first.with_bias && wants(first.at + 1)); }

  // `sums`: of dy, where they are known. `d_stream`, where defined, is added to the gradient of x.
  void first_backward(variable_list& out, const Gradient& dy, const Tensor& sums, const Tensor& d_stream) {
    const Tensor x = saved(Saved::x), weight = saved(Saved::weight);
    const bool trains = wants(first.at), again = trains && !first.kept_eight && !first.kept;
    Tensor read = again && !has_norm ? x : Tensor();
    if (reaches_x()) {
      const Tensor d_read = first.through(dy, weight).view(x.sizes());
      if (has_norm)
        read = norm_and_x(out, d_read, d_stream, again);
      else
        out[0] = d_stream.defined() ? d_read.add_(d_stream) : d_read;
    } else if (again && has_norm) {
      read = norm_forward(x, saved(Saved::norm_weight), centered ? saved(Saved::norm_bias) : Tensor(), eps).normed;
    }
    if (trains) {
      if (first.kept) read = saved(Saved::kept);
      const Quantized eight =
          first.kept_eight ? Quantized{.values = {}, .transposed = saved(Saved::kept), .inverse = saved(Saved::kept_inverse)}
                           : Quantized();
      give(out, first.at,
           first.to_weight(dy, eight, read.defined() ? for_later(as_rows(read)) : read, weight.scalar_type()));
    }
    if (first.with_bias && wants(first.at + 1)) give(out, first.at + 1, first.to_bias(dy.plain, sums));
  }

 private:
  // Returns the norm, where it is wanted again.
  Tensor norm_and_x(variable_list& out, const Tensor& d_normed, const Tensor& d_stream, bool again) {
    const Tensor of_weight = saved(Saved::norm_weight), of_bias = centered ? saved(Saved::norm_bias) : Tensor();
    const auto d = norm_backward(d_normed, d_stream,
                                 {.x = saved(Saved::x),
                                  .weight = of_weight,
                                  .bias = of_bias,
                                  .mean = centered ? saved(Saved::mean) : Tensor(),
                                  .rstd = saved(Saved::rstd),
                                  .again = again,
                                  .sums = wanted && centered});
    out[0] = d.x;
    if (d.sums.defined()) *wanted = {.gradient = d.x, .sums = d.sums};
    const auto to_norm = [](const std::shared_ptr<GradientSink>& sink, const Tensor& gradient, const Tensor& parameter) {
      return [sink, gradient, type = parameter.scalar_type()] { return parameter_gradient(sink, gradient, type); };
    };
    if (wants(1)) give(out, 1, to_norm(norm_weight_sink, d.weight, of_weight));
    if (centered && wants(2)) give(out, 2, to_norm(norm_bias_sink, d.bias, of_bias));
    return again ? d.normed : Tensor();
  }
};

struct NormedLinearNode final : NormedNode {
  variable_list backward(const variable_list& gradients) override {
    variable_list out(num_outputs());
    if (!gradients[0].defined()) {
      out[0] = gradients[1];
      return out;
    }
    const Tensor dy = gradients[0].reshape({-1, saved(Saved::weight).size(0)});
    first_backward(out, first.gradient_of(dy), handed_over(gradients[0]), gradients[1]);
    return out;
  }
};

// After the inputs of the above: the weight of the second product, and its bias if any.
struct FeedForwardNode final : NormedNode {
  struct AlsoSaved {
    enum At : std::size_t { wide = Saved::end, weight, kept, kept_inverse };
  };

  Activation activation = Activation::swiglu;
  bool with_residual = false;
  ProductPart second;

  variable_list backward(const variable_list& gradients) override {
    variable_list out(num_outputs());
    if (!gradients[0].defined()) {
      out[0] = gradients[1];
      return out;
    }
    const bool reaches = reaches_first();
    const auto [plain, eight, sums] = second_backward(out, gradients[0], reaches);
    if (!reaches) return out;
    const Gradient d_wide = eight.values.defined()
                                ? Gradient{.plain = {}, .eight = eight, .type = gradients[0].scalar_type()}
                                : first.gradient_of(plain);
    first_backward(out, d_wide, sums, with_residual ? gradients[0] : gradients[1]);
    return out;
  }

 private:
  // The gradient of what the activation reads: as it is, or in eight bits alone; its sums over rows where they cost nothing.
  struct WideGradient {
    Tensor plain;
    Quantized eight;
    Tensor sums;
  };
  // The activation, where it was made again: as it is, or in eight bits.
  struct Active {
    Tensor plain;
    Quantized eight;
  };

  WideGradient second_backward(variable_list& out, const Tensor& d_out, bool reaches) {
    const Tensor wide = take_saved(AlsoSaved::wide), weight = saved(AlsoSaved::weight);
    const Gradient dy = second.gradient_of(d_out.reshape({-1, weight.size(0)}));
    const bool trains = wants(second.at), again = trains && !second.kept_eight && !second.kept;
    WideGradient d_wide;
    Active active;
    if (reaches)
      d_wide = through_activation(dy, weight, wide, again ? &active : nullptr);
    else if (again)
      active.plain = activate(activation, wide);
    if (trains) {
      if (second.kept) active.plain = saved(AlsoSaved::kept);
      if (second.kept_eight)
        active.eight = {.values = {}, .transposed = saved(AlsoSaved::kept), .inverse = saved(AlsoSaved::kept_inverse)};
      give(out, second.at,
           second.to_weight(dy, active.eight, active.plain.defined() ? for_later(active.plain) : Tensor(),
                            weight.scalar_type()));
    }
    if (second.with_bias && wants(second.at + 1)) give(out, second.at + 1, second.to_bias(dy.plain, handed_over(d_out)));
    return d_wide;
  }

  // `again`: where the activation is to be made again; null: it is not.
  WideGradient through_activation(const Gradient& dy, const Tensor& weight, const Tensor& wide, Active* again) {
    if (rounds_at_once(again)) {
      auto made = quantized_swiglu_backward(
          second.through(dy, weight), wide,
          {.activated = again ? second.fp8->next_input() : KnownScale(), .gradient = first.fp8->next_gradient()});
      if (again) again->eight = std::move(made.activated);
      return {.plain = {}, .eight = std::move(made.d_wide), .sums = {}};
    }
    if (!second.reader)
      if (auto made = activated_product_backward(
              activation, {.dy = dy.plain, .weight = weight, .wide = wide, .again = again != nullptr})) {
        if (again) again->plain = made->active;
        return {.plain = made->d.wide, .eight = {}, .sums = made->d.column_sums};
      }
    const Tensor d_active = second.through(dy, weight);
    const auto made = (again ? activate_exchange : activate_backward)(activation, d_active, wide);
    if (again) again->plain = d_active;
    return {.plain = made.wide, .eight = {}, .sums = made.column_sums};
  }
  // Whether the gradient of what the activation read, and the activation if that is made again, can be rounded where they
  // are made: nothing else of them is read.
  bool rounds_at_once(const Active* again) const {
    return activation == Activation::swiglu && second.fp8 && first.fp8 && !first.with_bias && first.fp8->knows_gradient() &&
           (!again || second.fp8->knows_input());
  }
};

NormForward norm_of(const Tensor& x, const NormWeights& norm) {
  if (!norm.weight.defined()) return {.normed = x, .mean = {}, .rstd = {}};
  return norm_forward(x, norm.weight, norm.bias, norm.options.eps);
}

// What the first product makes, and the activation of that where it came with it.
struct Wide {
  Made made;
  Tensor active;
};
Wide make_wide(const Tensor& rows, const FeedForwardParts& parts, bool keep) {
  const auto& options = parts.up_options;
  if (!options.fp8)
    if (auto both = activated_product(parts.activation, rows, parts.up, options.bias))
      return {.made = {.out = both->wide, .kept = {}}, .active = both->active};
  return {.made = make_product(rows, parts.up, {.bias = options.bias}, {.fp8 = options.fp8.get(), .keep = keep}),
          .active = {}};
}

// `active`: undefined after it where nothing but its eight bits was made.
Made make_down(const Tensor& wide, Tensor& active, const FeedForwardParts& parts, const Addends& addends, bool keep) {
  const auto& options = parts.down_options;
  const How how{.fp8 = options.fp8.get(), .keep = keep};
  if (parts.activation == Activation::swiglu && how.fp8 && how.fp8->knows_input() && Fp8Product::suits(wide, parts.down)) {
    Made made{.out = {}, .kept = quantized_swiglu(wide, how.fp8->next_input(), keep), .in_fp8 = true};
    made.out = how.fp8->forward(made.kept, parts.down, addends, wide.scalar_type());
    return made;
  }
  if (!active.defined()) active = activate(parts.activation, wide);
  return make_product(active, parts.down, addends, how);
}

}  // namespace

Streamed normed_linear(const Tensor& given, const NormWeights& norm, const Tensor& weight, const LinearOptions& options) {
  require_rows({"normed_linear", "x", given});
  require_norm("normed_linear", given, norm);
  require_product({"normed_linear", "weight", "bias"}, given, given.size(-1), weight, options);
  const Tensor x = given.contiguous();
  auto node = node_behind<NormedLinearNode>({x, norm.weight, norm.bias, weight, options.bias});
  NormForward normed;
  Streamed out;
  Made made;
  {
    const at::AutoDispatchBelowADInplaceOrView guard;
    normed = norm_of(x, norm);
    made = make_product(as_rows(normed.normed), weight, {.bias = options.bias},
                        {.fp8 = options.fp8.get(), .keep = node && weight.requires_grad()});
    out = {.out = made.out.view(with_last(x, weight.size(0))), .stream = x.tensor_data()};
  }
  if (!node) return out;
  node->remember({x, norm, normed, weight, options, made});
  node->expect_sums(options.bias);
  torch::autograd::set_history(out.out, node);
  torch::autograd::set_history(out.stream, node);
  return out;
}

Streamed feed_forward(const Tensor& given, const FeedForwardParts& parts) {
  const auto& [norm, up, up_options, activation, down, down_options, residual, reads] = parts;
  require_rows({"feed_forward", "x", given});
  if (norm.weight.defined()) require_norm("feed_forward", given, norm);
  require_product({"feed_forward", "weight up", "bias up"}, given, given.size(-1), up, up_options);
  const bool gated = activation == Activation::swiglu;
  require(!gated || up.size(0) % 2 == 0, "feed_forward: the weight up has {} rows; allowed: as many gates as ups",
          up.size(0));
  require_product({"feed_forward", "weight down", "bias down"}, given, up.size(0) / (gated ? 2 : 1), down, down_options);
  require(!residual || down.size(0) == given.size(-1),
          "feed_forward: the weight down has {} rows; allowed with a residual: {}", down.size(0), given.size(-1));
  const Tensor x = given.contiguous();
  auto node = node_behind<FeedForwardNode>({x, norm.weight, norm.bias, up, up_options.bias, down, down_options.bias});
  Wide wide;
  {
    const at::AutoDispatchBelowADInplaceOrView guard;
    const auto normed = norm_of(x, norm);
    wide = make_wide(as_rows(normed.normed), parts, node && norm.weight.defined() && up.requires_grad());
    if (node) node->remember({x, norm, normed, up, up_options, wide.made});
    if (node && reads) reads(wide.made.out);
  }
  Made made;
  Streamed out;
  {
    const at::AutoDispatchBelowADInplaceOrView guard;
    made = make_down(wide.made.out, wide.active, parts,
                     {.bias = down_options.bias, .residual = residual ? as_rows(x) : Tensor()},
                     node && down_options.keep && down.requires_grad());
    out.out = made.out.view(with_last(x, down.size(0)));
    if (!residual) out.stream = x.tensor_data();
  }
  if (!node) return out;
  auto& second = node->second;
  second.at = node->first.at + (up_options.bias.defined() ? 2 : 1);
  second.take(down_options, made);
  second.kept_eight = made.kept.transposed.defined();
  second.kept = !second.kept_eight && down_options.keep && down.requires_grad();
  const Tensor in_eight = second.kept_eight ? made.kept.transposed : Tensor();
  for (const Tensor& tensor : {wide.made.out, down, second.kept ? wide.active : in_eight, made.kept.inverse})
    node->save(tensor);
  node->activation = activation;
  node->with_residual = residual;
  node->expect_sums(down_options.bias);
  torch::autograd::set_history(out.out, node);
  if (!residual) torch::autograd::set_history(out.stream, node);
  return out;
}

Tensor feed_forward_wide(const Tensor& x, const FeedForwardParts& parts) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  const auto normed = norm_of(x.contiguous(), parts.norm);
  return make_wide(as_rows(normed.normed), parts, /*keep=*/false).made.out;
}

}  // namespace bonfire
