#include "bonfire/nn/split_products.h"

#include <algorithm>
#include <vector>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <fmt/ranges.h>

#include "bonfire/base/error.h"
#include "bonfire/kernels/argument.h"
#include "bonfire/kernels/backward_node.h"
#include "bonfire/kernels/cross_entropy.h"
#include "bonfire/kernels/partial_cross_entropy.h"
#include "bonfire/nn/exchanged_product.h"
#include "bonfire/nn/split_arguments.h"

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

// The sizes of what lies between split layers, where it is gathered.
std::vector<std::int64_t> with_all_positions(const Tensor& x, const TensorRanks& ranks) {
  auto sizes = x.sizes().vec();
  if (ranks.sequence) sizes[1] *= ranks.group.size();
  return sizes;
}

void refuse_fp8(const char* op, const LinearOptions& options) {
  require(!options.fp8, "{}: products of split weights are not made in fp8", op);
}

NormForward norm_of(const Tensor& x, const NormWeights& norm) {
  if (!norm.weight.defined()) return {.normed = x, .mean = {}, .rstd = {}};
  return norm_forward(x, norm.weight, norm.bias, norm.options.eps);
}

// What backward needs of a norm.
struct NormPart {
  NormWeights weights;  // of which the sinks and eps count; tensors are saved
  bool has = false, centered = false;

  void take(const NormWeights& norm) {
    has = norm.weight.defined();
    centered = norm.bias.defined();
    weights.options = norm.options;
  }
};

// A gradient of a parameter, made and summed already.
auto handed(const std::shared_ptr<GradientSink>& sink, const Tensor& gradient, at::ScalarType type) {
  return [sink, gradient, type] { return parameter_gradient(sink, gradient, type); };
}

// Inputs: x, the norm's weight and bias; what is undefined has no place among them.
struct NormedBetween : BackwardNode {
  struct Saved {
    enum At : std::size_t { x, norm_weight, norm_bias, mean, rstd, end };
  };
  TensorRanks ranks;
  NormPart norm;

  void remember_norm(const Tensor& x, const NormWeights& weights, const NormForward& made, const TensorRanks& on) {
    ranks = on;
    norm.take(weights);
    for (const Tensor& tensor : {x, weights.weight, weights.bias, made.mean, made.rstd}) save(tensor);
  }
  std::size_t behind_norm() const { return 1 + (norm.has ? 1 : 0) + (norm.centered ? 1 : 0); }
  bool reaches_normed() { return task_should_compute_output(0) || (norm.has && wants(1)) || (norm.centered && wants(2)); }
  Tensor normed_again() {
    const Tensor x = saved(Saved::x);
    if (!norm.has) return x;
    return norm_forward(x, saved(Saved::norm_weight), norm.centered ? saved(Saved::norm_bias) : Tensor(),
                        norm.weights.options.eps)
        .normed;
  }
  void norm_gradients(variable_list& out, const Tensor& d_normed, const Tensor& d_stream) {
    if (!norm.has) {
      out[0] = d_stream.defined() ? d_normed.add(d_stream) : d_normed;
      return;
    }
    const Tensor of_weight = saved(Saved::norm_weight), of_bias = norm.centered ? saved(Saved::norm_bias) : Tensor();
    const auto d = norm_backward(d_normed, d_stream,
                                 {.x = saved(Saved::x),
                                  .weight = of_weight,
                                  .bias = of_bias,
                                  .mean = norm.centered ? saved(Saved::mean) : Tensor(),
                                  .rstd = saved(Saved::rstd)});
    out[0] = d.x;
    const auto& options = norm.weights.options;
    if (wants(1)) give(out, 1, handed(options.weight_sink, summed_gradient(ranks, d.weight), of_weight.scalar_type()));
    if (norm.centered && wants(2))
      give(out, 2, handed(options.bias_sink, summed_gradient(ranks, d.bias), of_bias.scalar_type()));
  }
};

struct RowsNode final : NormedBetween {
  struct AlsoSaved {
    enum At : std::size_t { weight = Saved::end, kept };
  };
  std::shared_ptr<GradientSink> weight_sink, bias_sink;
  at::ScalarType bias_type = at::kFloat;
  bool with_bias = false, kept = false;

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
    const Tensor weight = saved(AlsoSaved::weight);
    const Tensor dy = gradients[0].reshape({-1, weight.size(0)});
    const std::size_t at = behind_norm();
    const bool trains = wants(at), reaches = reaches_normed();
    // With a split sequence what the product read comes again while the gradient of it is made, and that goes while the
    // gradient of the weight is made.
    std::optional<Gathering> read;
    const auto begin_read = [&] {
      if (trains) read.emplace(ranks, kept ? saved(AlsoSaved::kept) : normed_again());
    };
    if (ranks.sequence) begin_read();
    std::optional<Summing> d_normed;
    if (reaches) d_normed.emplace(ranks, product(dy, weight).view(with_last(gradients[0], weight.size(1))));
    if (!ranks.sequence) begin_read();
    if (trains)
      give(out, at, [sink = weight_sink, dy, rows = for_later(as_rows(read->finish())), type = weight.scalar_type()] {
        return weight_gradient(dy, rows, {.sink = sink.get(), .type = type});
      });
    if (with_bias && wants(at + 1))
      give(out, at + 1,
           [sink = bias_sink, dy, type = bias_type] { return parameter_gradient(sink, column_sums(dy), type); });
    if (reaches)
      norm_gradients(out, d_normed->finish(), gradients[1]);
    else
      out[0] = gradients[1];
    return out;
  }
};

// Inputs: x, the weight, the bias and the residual, as far as they are there.
struct ColumnsNode final : BackwardNode {
  struct Saved {
    enum At : std::size_t { x, weight, kept };
  };
  TensorRanks ranks;
  std::optional<Activation> activation;
  std::shared_ptr<GradientSink> weight_sink, bias_sink;
  at::ScalarType bias_type = at::kFloat;
  std::vector<std::int64_t> sizes;  // of x
  bool with_bias = false, with_residual = false, kept = false;

  std::vector<std::size_t> parameters() const override {
    return with_bias ? std::vector<std::size_t>{1, 2} : std::vector<std::size_t>{1};
  }

  variable_list backward(const variable_list& gradients) override {
    variable_list out(num_outputs());
    const Tensor weight = saved(Saved::weight);
    const bool trains = wants(1), reaches = task_should_compute_output(0);
    if (trains || reaches) {
      Tensor d, dy;
      if (reaches) {
        const auto made = gathered_product(gradients[0], weight, {.keep_read = trains}, ranks);
        d = as_rows(made.out);
        dy = made.read;
      } else {
        dy = Gathering(ranks, gradients[0]).finish();
      }
      const Tensor x = saved(Saved::x);
      Tensor read = !activation ? as_rows(x) : kept ? saved(Saved::kept) : Tensor();
      if (reaches) {
        if (activation) {
          const bool again = trains && !kept;
          const Tensor d_active = d;
          d = (again ? activate_exchange : activate_backward)(*activation, d_active, as_rows(x)).wide;
          if (again) read = d_active;
        }
        out[0] = d.view(sizes);
      } else if (!read.defined()) {
        read = activate(*activation, as_rows(x));
      }
      if (trains)
        give(out, 1, [sink = weight_sink, dy = as_rows(dy), rows = for_later(read), type = weight.scalar_type()] {
          return weight_gradient(dy, rows, {.sink = sink.get(), .type = type});
        });
    }
    if (with_bias && wants(2))
      give(out, 2, handed(bias_sink, summed_gradient(ranks, column_sums(as_rows(gradients[0]))), bias_type));
    if (with_residual) out.back() = gradients[0];
    return out;
  }
};

struct NormNode final : NormedBetween {
  std::vector<std::size_t> parameters() const override {
    return norm.centered ? std::vector<std::size_t>{1, 2} : std::vector<std::size_t>{1};
  }
  variable_list backward(const variable_list& gradients) override {
    variable_list out(num_outputs());
    norm_gradients(out, gradients[0].contiguous(), {});
    return out;
  }
};

struct SharedHeadsNode : BackwardNode {
  std::int64_t queries = 0;
  Group sharing;

  variable_list backward(const variable_list& gradients) override {
    const Tensor& d = gradients[0];
    const std::int64_t batch = d.size(0), sequence = d.size(1), parts = sharing.size(),
                       made = (d.size(2) - queries) / 2 / parts;
    const Tensor whole = d.narrow(2, queries, 2 * parts * made)
                             .reshape({batch, sequence, 2, parts, made})
                             .permute({3, 0, 1, 2, 4})
                             .contiguous();
    const Tensor own = at::empty({batch, sequence, 2 * made}, d.options());
    sharing.reduce_scatter(own, whole).wait();
    return {at::cat({d.narrow(2, 0, queries), own}, 2)};
  }
};

// --- The loss.

struct LossScale {
  Tensor value;   // the mean
  Tensor factor;  // what a row's gradient is multiplied by
};

LossScale mean_of(const Tensor& losses, const Tensor& counted, at::ScalarType type) {
  const Tensor sum = losses.mul(counted).sum(), count = counted.sum().to(at::kDouble);
  return {sum.div(count).to(type), count.clamp_min(1).reciprocal().to(type)};
}

// Losses of rows; with `gradient` softmax minus one-hot is left in the logits. Collective.
Tensor row_losses(const Tensor& logits, const Tensor& target, const Tensor& counted, const TensorRanks& ranks,
                  bool gradient) {
  const Tensor mine = partial_softmax(logits, target);
  const Tensor all = at::empty({ranks.group.size(), mine.size(0), 3}, mine.options());
  ranks.group.all_gather(all, mine).wait();
  const auto joined = join_softmax(all);
  if (gradient) make_own_gradient(logits, {.target = target, .sums = joined.sums, .counted = counted});
  return joined.losses;
}

// Where the logits' gradient is kept.
struct LossNode : BackwardNode {
  TensorRanks ranks;
  std::shared_ptr<GradientSink> sink;

  std::vector<std::size_t> parameters() const override { return {1}; }

  variable_list backward(const variable_list& gradients) override {
    const Tensor gradient = saved(0), x = saved(2), weight = saved(3), factor = gradients[0].mul(saved(1));
    variable_list out(2);
    const bool trains = wants(1);
    std::optional<Gathering> read;
    if (trains) read.emplace(ranks, x);
    std::optional<Summing> dx;
    if (task_should_compute_output(0)) {
      const Tensor partial = product(gradient, weight).mul_(factor);
      dx.emplace(ranks, partial.view(with_all_positions(x, ranks)));
    }
    if (trains)
      give(out, 1,
           [sink = sink, gradient, rows = for_later(as_rows(read->finish()).mul(factor)), type = weight.scalar_type()] {
             return weight_gradient(gradient, rows, {.sink = sink.get(), .type = type});
           });
    if (dx) out[0] = dx->finish();
    return out;
  }
};

// Where forward has made both gradients, up to the factor.
struct ChunkedLossNode : BackwardNode {
  TensorRanks ranks;
  std::shared_ptr<GradientSink> sink;
  at::ScalarType weight_type = at::kFloat;
  std::vector<std::int64_t> sizes;  // of x with all positions

  std::vector<std::size_t> parameters() const override { return {1}; }

  variable_list backward(const variable_list& gradients) override {
    const Tensor partial = saved(0), d_weight = saved(2), factor = gradients[0].mul(saved(1));
    variable_list out(2);
    std::optional<Summing> dx;
    if (task_should_compute_output(0)) dx.emplace(ranks, partial.mul(factor).view(sizes));
    if (wants(1))
      give(out, 1, [sink = sink, d_weight, factor, type = weight_type] {
        return parameter_gradient(sink, d_weight.mul(factor), type);
      });
    if (dx) out[0] = dx->finish();
    return out;
  }
};

at::ScalarType loss_type(const Tensor& x) { return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat; }

}  // namespace

Streamed rows_linear(const Tensor& given, const NormWeights& norm, const Tensor& weight, const LinearOptions& options,
                     const TensorRanks& ranks) {
  require_between_layers("rows_linear", given, ranks);
  require_norm_between("rows_linear", given, norm);
  require_split_product("rows_linear", given, given.size(-1), weight, options.bias);
  require(!options.residual.defined(), "rows_linear: its options have a residual; allowed: none");
  refuse_fp8("rows_linear", options);
  const Tensor x = given.contiguous();
  auto node = node_behind<RowsNode>({x, norm.weight, norm.bias, weight, options.bias});
  Streamed out;
  NormForward normed;
  {
    const at::AutoDispatchBelowADInplaceOrView guard;
    normed = norm_of(x, norm);
    out.out = gathered_product(normed.normed, weight.t(), {.bias = options.bias}, ranks).out;
    out.stream = x.tensor_data();
  }
  if (!node) return out;
  node->remember_norm(x, norm, normed, ranks);
  node->kept = norm.weight.defined() && options.keep && weight.requires_grad();
  node->save(weight);
  node->save(node->kept ? normed.normed : Tensor());
  node->weight_sink = options.weight_sink;
  node->bias_sink = options.bias_sink;
  node->with_bias = options.bias.defined();
  if (node->with_bias) node->bias_type = options.bias.scalar_type();
  torch::autograd::set_history(out.out, node);
  torch::autograd::set_history(out.stream, node);
  return out;
}

Tensor columns_linear(const Tensor& given, const Tensor& weight, const ColumnsLinearOptions& how, const TensorRanks& ranks) {
  const auto& options = how.linear;
  const bool gated = how.activation == Activation::swiglu;
  require_between_layers("columns_linear", given, ranks);
  require_split_product("columns_linear", given,
                        gated ? require_halves({"columns_linear", "x, gates and ups,", given}) : given.size(-1), weight,
                        options.bias);
  if (options.residual.defined())
    require_sizes({"columns_linear", "residual", options.residual}, sizes_between_layers(given, weight.size(0), ranks),
                  given);
  refuse_fp8("columns_linear", options);
  const Tensor x = given.contiguous();
  auto node = node_behind<ColumnsNode>({x, weight, options.bias, options.residual});
  Tensor out, read;
  {
    const at::AutoDispatchBelowADInplaceOrView guard;
    read = how.activation ? activate(*how.activation, as_rows(x)) : as_rows(x);
    out = summed_product(read.view(with_last(x, read.size(-1))), weight.t(), ranks);
    if (options.bias.defined()) out.add_(options.bias);
    if (options.residual.defined()) out.add_(options.residual);
  }
  if (!node) return out;
  node->ranks = ranks;
  node->activation = how.activation;
  node->kept = how.activation && options.keep && weight.requires_grad();
  for (const Tensor& tensor : {x, weight, node->kept ? read : Tensor()}) node->save(tensor);
  node->sizes = x.sizes().vec();
  node->weight_sink = options.weight_sink;
  node->bias_sink = options.bias_sink;
  node->with_bias = options.bias.defined();
  node->with_residual = options.residual.defined();
  if (node->with_bias) node->bias_type = options.bias.scalar_type();
  torch::autograd::set_history(out, node);
  return out;
}

Tensor norm_between(const Tensor& given, const NormWeights& norm, const TensorRanks& ranks) {
  require_between_layers("norm_between", given, ranks);
  require_norm_between("norm_between", given, norm);
  const Tensor x = given.contiguous();
  auto node = node_behind<NormNode>({x, norm.weight, norm.bias});
  NormForward made;
  {
    const at::AutoDispatchBelowADInplaceOrView guard;
    made = norm_of(x, norm);
  }
  if (!node) return made.normed;
  node->remember_norm(x, norm, made, ranks);
  torch::autograd::set_history(made.normed, node);
  return made.normed;
}

Tensor gather_shared_heads(const Tensor& packed, const SharedHeads& heads) {
  const std::int64_t parts = heads.sharing.size();
  require_shared_heads(packed, heads.queries);
  if (parts == 1) return packed;
  auto node = node_behind<SharedHeadsNode>({packed});
  Tensor out;
  {
    const at::AutoDispatchBelowADInplaceOrView guard;
    const std::int64_t batch = packed.size(0), sequence = packed.size(1), made = (packed.size(2) - heads.queries) / 2;
    const Tensor own = packed.narrow(2, heads.queries, 2 * made).contiguous();
    const Tensor all = at::empty({parts, batch, sequence, 2, made}, packed.options());
    heads.sharing.all_gather(all, own).wait();
    out = at::cat(
        {packed.narrow(2, 0, heads.queries), all.permute({1, 2, 3, 0, 4}).reshape({batch, sequence, 2 * parts * made})}, 2);
  }
  if (!node) return out;
  node->queries = heads.queries;
  node->sharing = heads.sharing;
  torch::autograd::set_history(out, node);
  return out;
}

Tensor rows_cross_entropy(const Tensor& given, const Tensor& weight, const Tensor& given_target,
                          const SplitLossOptions& options, const TensorRanks& ranks) {
  require_between_layers("rows_cross_entropy", given, ranks);
  require_split_product("rows_cross_entropy", given, given.size(-1), weight, {});
  require_targets_of_rows(given, given_target, ranks);
  require(options.first >= 0 && options.first + weight.size(0) <= options.classes,
          "rows_cross_entropy: the weight is [{}], rows from {} on of {} classes; allowed: rows of them",
          fmt::join(weight.sizes(), ", "), options.first, options.classes);
  const Tensor x = given.contiguous();
  const at::ScalarType type = loss_type(x);
  constexpr std::int64_t ignored = -100;
  Tensor read, target, counted;
  {
    const at::AutoDispatchBelowADInplaceOrView guard;
    target = given_target.to(at::kLong).reshape({-1});
    counted = target.ne(ignored);
    if (target.is_cpu()) {
      const bool fits =
          target.ge(0).logical_and_(target.lt(options.classes)).logical_or_(target.eq(ignored)).all().item<bool>();
      require(fits, "rows_cross_entropy: a target is none of 0 to {}, nor {} to ignore it", options.classes - 1, ignored);
    }
    target = target.sub(options.first);
    read = as_rows(Gathering(ranks, x).finish());
  }
  // Of the longest part, so that all ranks have the same chunks.
  const std::int64_t rows = read.size(0), parts = ranks.group.size(),
                     row_bytes = (options.classes + parts - 1) / parts * static_cast<std::int64_t>(x.element_size());

  if (rows * row_bytes <= options.most_logit_bytes) {
    auto node = node_behind<LossNode>({x, weight});
    LossScale loss;
    Tensor logits;
    {
      const at::AutoDispatchBelowADInplaceOrView guard;
      logits = product(read, weight.t());
      loss = mean_of(row_losses(logits, target, counted, ranks, node != nullptr), counted, type);
    }
    if (!node) return loss.value;
    for (const Tensor& tensor : {logits, loss.factor, x, weight}) node->save(tensor);
    node->ranks = ranks;
    node->sink = options.weight_sink;
    torch::autograd::set_history(loss.value, node);
    return loss.value;
  }

  auto node = node_behind<ChunkedLossNode>({x, weight});
  const bool needs_x = node && x.requires_grad(), needs_weight = node && weight.requires_grad();
  LossScale loss;
  Tensor dx, d_weight;
  {
    const at::AutoDispatchBelowADInplaceOrView guard;
    if (needs_x) dx = at::empty(read.sizes(), read.options());
    if (needs_weight) d_weight = at::empty(weight.sizes(), weight.options().dtype(type));
    const std::int64_t chunk = rows_of_chunk(rows, row_bytes, options.most_logit_bytes);
    std::vector<Tensor> losses;
    for (std::int64_t begin = 0; begin < rows; begin += chunk) {
      const std::int64_t size = std::min(chunk, rows - begin);
      const Tensor part = read.narrow(0, begin, size), logits = product(part, weight.t());
      losses.push_back(
          row_losses(logits, target.narrow(0, begin, size), counted.narrow(0, begin, size), ranks, node != nullptr));
      if (needs_x) product_into(dx.narrow(0, begin, size), logits, weight, Writing::overwrite);
      if (needs_weight) product_into(d_weight, logits.t(), part, begin == 0 ? Writing::overwrite : Writing::add);
    }
    loss = mean_of(at::cat(losses), counted, type);
  }
  if (!node) return loss.value;
  for (const Tensor& tensor : {dx, loss.factor, d_weight}) node->save(tensor);
  node->ranks = ranks;
  node->sink = options.weight_sink;
  node->weight_type = weight.scalar_type();
  node->sizes = with_all_positions(x, ranks);
  torch::autograd::set_history(loss.value, node);
  return loss.value;
}

}  // namespace bonfire
