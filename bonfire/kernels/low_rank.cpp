#include "bonfire/kernels/low_rank.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include "bonfire/kernels/argument.h"
#include "bonfire/kernels/backward_node.h"
#include "bonfire/kernels/product.h"

namespace bonfire {
namespace {

using at::Tensor;
using torch::autograd::variable_list;

Tensor rows_of(const Tensor& x) { return x.reshape({-1, x.size(-1)}); }

// The same elements go, forward and backward: what is dropped is a function of the place in x.
Tensor dropped(const Tensor& x, const DropoutOptions& options) { return options.p > 0 ? dropout(x, options) : x; }

// Inputs: y, x, and of each adapter a and b.
struct LowRankNode final : BackwardNode {
  struct Part {
    std::int64_t begin = 0;
    std::shared_ptr<GradientSink> a_sink, b_sink;
    DropoutOptions dropout;
  };
  static constexpr std::size_t first = 2;  // of the adapters, among the inputs
  // Of what is saved: x, and of each adapter a, b and what lies between them, scaled.
  static std::size_t place(std::size_t part) { return 1 + 3 * part; }

  std::vector<Part> parts;
  std::vector<std::int64_t> sizes;  // of x
  double scale = 1;

  std::vector<std::size_t> parameters() const override {
    std::vector<std::size_t> all;
    for (std::size_t at = first; at < next_edges().size(); ++at) all.push_back(at);
    return all;
  }

  variable_list backward(const variable_list& gradients) override {
    variable_list out(num_outputs());
    const Tensor dy = rows_of(gradients[0]);
    if (task_should_compute_output(0)) out[0] = gradients[0];
    const bool reaches_x = task_should_compute_output(1);
    const Tensor x = saved(0);
    Tensor dx;
    for (std::size_t at = 0; at < parts.size(); ++at) {
      const auto& part = parts[at];
      const std::size_t to_a = first + 2 * at, to_b = to_a + 1;
      const Tensor a = saved(place(at)), b = saved(place(at) + 1), between = saved(place(at) + 2);
      const Tensor own = dy.narrow(1, part.begin, b.size(0));
      Tensor d_between;
      if (reaches_x || wants(to_a)) d_between = product(own, b).mul_(scale);
      if (reaches_x) add_to(dx, d_between, a, part.dropout);
      if (wants(to_a))
        give(out, to_a, [sink = part.a_sink, d_between, x = for_later(x), drop = part.dropout, type = a.scalar_type()] {
          return weight_gradient(d_between, rows_of(dropped(x, drop)), {.sink = sink.get(), .type = type});
        });
      if (wants(to_b))
        give(out, to_b, [sink = part.b_sink, own, between, type = b.scalar_type()] {
          return weight_gradient(own, between, {.sink = sink.get(), .type = type});
        });
    }
    if (dx.defined()) out[1] = dx.view(sizes);
    return out;
  }

 private:
  void add_to(Tensor& dx, const Tensor& d_between, const Tensor& a, const DropoutOptions& drop) const {
    if (drop.p > 0) {
      const Tensor more = rows_of(dropout(product(d_between, a).view(sizes), drop));
      dx = dx.defined() ? dx.add_(more) : more;
    } else if (dx.defined()) {
      product_into(dx, d_between, a, Writing::add);
    } else {
      dx = product(d_between, a);
    }
  }
};

void require_adapter(const Tensor& y, const Tensor& x, const LowRank& adapter) {
  const auto& [a, b, begin, a_sink, b_sink, drop] = adapter;
  require_sizes({"add_low_rank", "a", a}, {any_size, x.size(-1)}, x);
  require_sizes({"add_low_rank", "b", b}, {any_size, a.size(0)}, x);
  require(begin >= 0 && begin + b.size(0) <= y.size(-1),
          "add_low_rank: an adapter adds to columns {} to {}; allowed: 0 to {}", begin, begin + b.size(0), y.size(-1));
}

}  // namespace

Tensor add_low_rank(const Tensor& y, const Tensor& given, const std::vector<LowRank>& adapters, double scale) {
  require_rows({"add_low_rank", "y", y});
  require_rows({"add_low_rank", "x", given});
  require(y.is_contiguous(), "add_low_rank: y is not contiguous; allowed: what a product has made");
  auto sizes = given.sizes().vec();
  sizes.back() = y.size(-1);
  require_sizes({"add_low_rank", "y", y}, sizes, given);
  const Tensor x = given.contiguous();
  std::vector<Tensor> inputs{y, x};
  for (const auto& adapter : adapters) {
    require_adapter(y, x, adapter);
    inputs.push_back(adapter.a);
    inputs.push_back(adapter.b);
  }
  auto node = node_behind<LowRankNode>(inputs);
  std::vector<Tensor> between;
  Tensor out;
  {
    const at::AutoDispatchBelowADInplaceOrView guard;
    const Tensor rows = rows_of(y);
    for (const auto& adapter : adapters) {
      between.push_back(product(rows_of(dropped(x, adapter.dropout)), adapter.a.t()).mul_(scale));
      product_into(rows.narrow(1, adapter.begin, adapter.b.size(0)), between.back(), adapter.b.t(), Writing::add);
    }
    out = y.tensor_data();
  }
  if (!node) return out;
  node->sizes = x.sizes().vec();
  node->scale = scale;
  node->save(x);
  for (std::size_t at = 0; at < adapters.size(); ++at) {
    const auto& adapter = adapters[at];
    node->parts.push_back({adapter.begin, adapter.a_sink, adapter.b_sink, adapter.dropout});
    for (const Tensor& tensor : {adapter.a, adapter.b, between[at]}) node->save(tensor);
  }
  torch::autograd::set_history(out, node);
  return out;
}

}  // namespace bonfire
