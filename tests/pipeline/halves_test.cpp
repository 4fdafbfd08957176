// The two halves of a backward are the whole, and each does its own part only.
#include <functional>
#include <vector>

#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include "bonfire/kernels/fused_linear.h"
#include "bonfire/nn/layers.h"
#include "bonfire/pipeline/halves.h"

namespace bonfire::halves_test {
namespace {

at::Tensor numbers(at::IntArrayRef shape, double shift = 0) {
  std::int64_t count = 1;
  for (const auto size : shape) count *= size;
  return at::arange(count, at::kDouble).add(shift).sin().view(shape);
}

struct Case {
  const char* name;
  Tensors parameters;
  at::Tensor input;  // not differentiable: integers
  std::function<at::Tensor(const at::Tensor&)> forward;
};

at::Tensor leaf(at::Tensor values) { return values.set_requires_grad(true); }

std::vector<Case> cases() {
  std::vector<Case> list;
  {
    const auto weight = leaf(numbers({5, 5})), bias = leaf(numbers({5}, 2));
    nn::Linear ours(weight, bias);
    list.push_back({"our linear, with a residual", {weight, bias}, numbers({3, 5}), [ours](const at::Tensor& x) mutable {
                      return ours->forward(x.tanh(), x);
                    }});
    const auto gain = leaf(numbers({5}, 4));
    nn::Norm norm(gain, at::Tensor(), 1e-5);
    list.push_back(
        {"our norm and linear, twice with one weight",
         {weight, bias, gain},
         numbers({3, 5}),
         [ours, norm](const at::Tensor& x) mutable { return ours->forward(norm->forward(ours->forward(x)).sigmoid()); }});
    const auto up = leaf(numbers({8, 5}, 3)), wide_bias = leaf(numbers({8}, 5)), down = leaf(numbers({5, 8}, 6));
    const auto norm_bias = leaf(numbers({5}, 8));
    nn::Norm layer_norm(gain, norm_bias, 1e-5);
    nn::FeedForward gelu(nn::Activation::gelu, nn::Linear(up, wide_bias), nn::Linear(down, bias));
    list.push_back({"our fused feed-forward part, with biases",
                    {up, wide_bias, down, bias, gain, norm_bias},
                    numbers({3, 5}),
                    [gelu, layer_norm](const at::Tensor& x) mutable { return gelu->forward(layer_norm, x.tanh()); }});
    const auto gate_up = leaf(numbers({8, 5}, 3)), narrow = leaf(numbers({5, 4}, 6));
    nn::FeedForward swiglu(nn::Activation::swiglu, nn::Linear(gate_up), nn::Linear(narrow));
    list.push_back({"our fused gated feed-forward part",
                    {gate_up, narrow, gain},
                    numbers({3, 5}),
                    [swiglu, norm](const at::Tensor& x) mutable { return swiglu->forward(norm, x); }});
    list.push_back({"our head", {weight, gain}, numbers({3, 5}), [weight, norm](const at::Tensor& x) mutable {
                      return nn::Linear(weight)->loss(norm->forward(x), at::arange(3)).unsqueeze(0);
                    }});
    list.push_back({"a weight of ours that depends on the input", {weight, gain}, numbers({5, 5}), [=](const at::Tensor& x) {
                      return bonfire::linear(x, weight * x, LinearOptions()) +
                             bonfire::linear(gain.expand({5, 5}), weight, LinearOptions{.residual = x});
                    }});
    const auto table = leaf(numbers({7, 5}, 1));
    nn::Embedding rows(table);
    list.push_back({"tokens", {table, weight, bias}, at::arange(6).view({2, 3}), [rows, ours](const at::Tensor& x) mutable {
                      return ours->forward(rows->forward(x)).tanh();
                    }});
    nn::Linear head(table);
    list.push_back(
        {"tokens and a tied head",
         {table, weight, bias},
         at::arange(6).view({2, 3}),
         [rows, ours, head](const at::Tensor& x) mutable { return head->forward(ours->forward(rows->forward(x)).tanh()); }});
  }
  {
    torch::nn::Linear linear(4, 4);
    linear->to(at::kDouble);
    torch::nn::LayerNorm norm(torch::nn::LayerNormOptions({4}));
    norm->to(at::kDouble);
    list.push_back({"torch's linear and layer norm",
                    {linear->weight, linear->bias, norm->weight, norm->bias},
                    numbers({3, 4}),
                    [linear, norm](const at::Tensor& x) mutable { return norm->forward(linear->forward(x)) * x; }});
    torch::nn::Conv2d convolution(torch::nn::Conv2dOptions(2, 3, 3).padding(1));
    convolution->to(at::kDouble);
    list.push_back({"torch's convolution",
                    {convolution->weight, convolution->bias},
                    numbers({2, 2, 4, 4}),
                    [convolution](const at::Tensor& x) mutable { return convolution->forward(x).relu(); }});
    // The product is held by the sum alone, from which the first half cuts it off.
    const auto weight = leaf(numbers({4, 4}, 1)), bias = leaf(numbers({4}, 2));
    list.push_back({"torch's product and sum, of an input without a gradient",
                    {weight, bias},
                    at::arange(12).view({3, 4}),
                    [weight, bias](const at::Tensor& x) {
                      const auto y = x.to(at::kDouble).matmul(weight.t()) + bias;
                      return y.tanh().matmul(weight.t()) + bias;
                    }});
    const auto gain = leaf(numbers({4}));
    list.push_back(
        {"a parameter through operations of its own",
         {gain, linear->weight},
         numbers({3, 4}),
         [gain, linear](const at::Tensor& x) { return x.mul(gain.exp()).matmul(linear->weight.t().tanh()) + gain; }});
  }
  return list;
}

Tensors take_gradients(const Tensors& parameters) {
  Tensors gradients;
  for (const auto& parameter : parameters) {
    gradients.push_back(parameter.grad().defined() ? parameter.grad().clone() : at::Tensor());
    parameter.mutable_grad().reset();
  }
  return gradients;
}

ForwardGraph run(const Case& on) {
  ForwardGraph graph;
  auto input = on.input.detach();
  if (input.is_floating_point()) graph.inputs.push_back(input.set_requires_grad(true));
  graph.outputs.push_back(torch::autograd::impl::gradient_edge(on.forward(input)));
  return graph;
}

TEST(Halves, AreTheWhole) {
  for (const auto& on : cases()) {
    SCOPED_TRACE(on.name);
    const auto shape = on.forward(on.input).sizes().vec();
    const Tensors gradient{numbers(shape, 9)};
    const auto of_input = whole_backward(run(on), gradient);
    const auto whole = take_gradients(on.parameters);

    WeightGradients later;
    const auto graph = run(on);
    EXPECT_EQ(unsplittable(graph), "");
    std::vector<int> heard(on.parameters.size());
    std::vector<unsigned> hooks;
    for (std::size_t at = 0; at < heard.size(); ++at)
      hooks.push_back(on.parameters[at].register_hook([&heard, at](const at::Tensor&) { ++heard[at]; }));
    const auto half = input_half(graph, gradient, later);
    ASSERT_EQ(half.size(), of_input.size());
    for (std::size_t at = 0; at < half.size(); ++at) EXPECT_TRUE(at::allclose(half[at], of_input[at], 1e-12, 1e-12));
    for (const auto& none : take_gradients(on.parameters)) EXPECT_FALSE(none.defined()) << "in the first half";
    weight_half(std::move(later));
    for (std::size_t at = 0; at < heard.size(); ++at) {
      EXPECT_EQ(heard[at], whole[at].defined() ? 1 : 0) << "parameter " << at << ": all of its uses at once";
      on.parameters[at].remove_hook(hooks[at]);
    }
    const auto made = take_gradients(on.parameters);
    for (std::size_t at = 0; at < made.size(); ++at) {
      ASSERT_EQ(made[at].defined(), whole[at].defined());
      if (!made[at].defined()) continue;
      EXPECT_TRUE(at::allclose(made[at], whole[at], 1e-12, 1e-12)) << "parameter " << at;
    }
  }
}

// Counts what it is asked for.
struct CountingNode : torch::autograd::Node {
  std::vector<int>* counts;
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    torch::autograd::variable_list out(2);
    for (const std::size_t at : {0, 1})
      if (task_should_compute_output(at)) ++(*counts)[at], out[at] = gradients[0];
    return out;
  }
};

at::Tensor counted(const at::Tensor& x, const at::Tensor& weight, std::vector<int>& counts) {
  std::shared_ptr<CountingNode> node(new CountingNode, torch::autograd::deleteNode);
  node->counts = &counts;
  node->set_next_edges(torch::autograd::collect_next_edges(x, weight));
  auto out = (x + weight).detach();
  torch::autograd::set_history(out, node);
  return out;
}

TEST(Halves, DoNothingTwice) {
  const auto weight = leaf(numbers({3}));
  std::vector<int> counts(2);
  ForwardGraph graph{.inputs = {leaf(numbers({3}))}};
  auto x = graph.inputs[0];
  for (int times = 0; times < 3; ++times) x = counted(x, weight, counts);
  graph.outputs.push_back(torch::autograd::impl::gradient_edge(x));
  x.reset();
  WeightGradients later;
  input_half(graph, {at::ones({3}, at::kDouble)}, later);
  EXPECT_EQ(counts, (std::vector{3, 0}));
  weight_half(std::move(later));
  EXPECT_EQ(counts, (std::vector{3, 3}));
  EXPECT_TRUE(at::equal(weight.grad(), at::full({3}, 3, at::kDouble)));
}

// Products of our own operators while this lives.
class Products {
 public:
  Products() {
    at::clearThreadLocalCallbacks();
    handle_ = at::addThreadLocalCallback(
        at::RecordFunctionCallback([](const at::RecordFunction& call) -> std::unique_ptr<at::ObserverContext> {
          const std::string name = call.name();
          if (name == "bonfire::product" || name == "bonfire::product_into_") ++count_;
          return nullptr;
        }).scopes({at::RecordScope::FUNCTION}));
    count_ = 0;
  }
  ~Products() { at::removeCallback(handle_); }
  static int count() { return count_; }

 private:
  static thread_local int count_;
  at::CallbackHandle handle_;
};
thread_local int Products::count_ = 0;

struct CountingSink : GradientSink {
  explicit CountingSink(const at::Tensor& parameter) : gradient(at::zeros_like(parameter)) {}
  at::Tensor buffer(bool& fresh) override {
    fresh = arrivals == 0;
    return gradient;
  }
  void arrived() override { ++arrivals; }
  at::Tensor gradient;
  int arrivals = 0;
};

// A block of ours: the first half makes no product of a weight's gradient, the second no other, and what is made arrives at
// once.
TEST(Halves, OfOurLayersPutWeightsOffAndMakeEachProductOnce) {
  struct Weight {
    explicit Weight(at::Tensor of) : value(leaf(std::move(of))), sink(std::make_shared<CountingSink>(value)) {}
    at::Tensor value;
    std::shared_ptr<CountingSink> sink;
  };
  const auto block = [](std::vector<Weight>& weights) {
    weights = {Weight(numbers({5})), Weight(numbers({8, 5}, 1)), Weight(numbers({8}, 2)), Weight(numbers({5, 8}, 3)),
               Weight(numbers({5}, 4))};
    ForwardGraph graph{.inputs = {leaf(numbers({3, 5}))}};
    const auto& [gain, up, up_bias, down, down_bias] = std::tie(weights[0], weights[1], weights[2], weights[3], weights[4]);
    const auto out =
        feed_forward(graph.inputs[0],
                     {.norm = {.weight = gain.value, .options = {.weight_sink = gain.sink}},
                      .up = up.value,
                      .up_options = {.bias = up_bias.value, .weight_sink = up.sink, .bias_sink = up_bias.sink},
                      .activation = Activation::gelu,
                      .down = down.value,
                      .down_options = {.bias = down_bias.value, .weight_sink = down.sink, .bias_sink = down_bias.sink}})
            .out;
    graph.outputs.push_back(torch::autograd::impl::gradient_edge(out));
    return graph;
  };
  const Tensors gradient{numbers({3, 5}, 9)};
  std::vector<Weight> whole, halved;
  const Products products;
  whole_backward(block(whole), gradient);
  const int of_whole = Products::count() - 2;  // without forward's
  EXPECT_EQ(of_whole, 4);

  const auto graph = block(halved);
  WeightGradients later;
  const int before = Products::count();
  input_half(graph, gradient, later);
  EXPECT_EQ(Products::count() - before, 2);
  EXPECT_TRUE(later.entries.empty());
  EXPECT_EQ(later.put_off->size(), halved.size());
  for (const auto& weight : halved) EXPECT_EQ(weight.sink->arrivals, 0);
  weight_half(std::move(later));
  EXPECT_EQ(Products::count() - before, of_whole);
  for (std::size_t at = 0; at < halved.size(); ++at) {
    EXPECT_EQ(halved[at].sink->arrivals, 1);
    EXPECT_TRUE(at::allclose(halved[at].sink->gradient, whole[at].sink->gradient, 1e-12, 1e-12)) << "weight " << at;
  }
}

struct InOnePiece : torch::autograd::Function<InOnePiece> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x, const at::Tensor& weight) {
    return x + weight;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list gradients) {
    return {gradients[0], gradients[0]};
  }
};

TEST(Halves, AnOperationInOnePieceIsNamed) {
  const auto weight = leaf(numbers({3}));
  ForwardGraph graph{.inputs = {leaf(numbers({3}))}};
  const auto out = InOnePiece::apply(graph.inputs[0], weight);
  graph.outputs.push_back(torch::autograd::impl::gradient_edge(out));
  EXPECT_NE(unsplittable(graph).find("InOnePiece"), std::string::npos);
}

}  // namespace
}  // namespace bonfire::halves_test
