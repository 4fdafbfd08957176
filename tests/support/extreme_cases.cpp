#include "tests/support/extreme_cases.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <utility>

#include <ATen/ATen.h>

#include "bonfire/kernels/activation.h"
#include "bonfire/kernels/attention.h"
#include "bonfire/kernels/cross_entropy.h"
#include "bonfire/kernels/embedding.h"
#include "bonfire/kernels/norm.h"
#include "bonfire/kernels/product.h"
#include "bonfire/kernels/qkv.h"

namespace bonfire::testing {
namespace {

using at::Tensor;

// A gradient's place that is in memory already, of any type.
struct Sink final : GradientSink {
  explicit Sink(const Tensor& place) : place(place) {}
  Tensor buffer(bool& fresh) override {
    fresh = false;
    return place;
  }
  void arrived() override {}
  Tensor place;
};

// All of them this number, to the last digit.
void expect_all(const Tensor& got, double number, const char* what) {
  ASSERT_TRUE(got.defined()) << what;
  EXPECT_TRUE((got.detach().to(at::kDouble) == number).all().item<bool>())
      << what << ": " << got.detach().flatten()[0].item<double>() << " in place of " << number;
}

}  // namespace

void expect_sums_are_rounded_once(const KernelCheck& check) {
  const auto options = at::TensorOptions(check.device).dtype(check.type);
  constexpr std::int64_t rows = 16384, columns = 8;
  const auto ones = [&](at::IntArrayRef sizes) { return at::ones(sizes, options).set_requires_grad(true); };
  const auto full = [&](at::IntArrayRef sizes, double x) { return at::full(sizes, x, options).set_requires_grad(true); };
  const auto weight_of = [&] { return ones({columns}); };

  // Norms: half of the elements 1, the others -1, so that each is its own norm.
  const Tensor signs = at::ones({rows, columns}, options);
  signs.narrow(1, 0, columns / 2).fill_(-1);
  {
    const Tensor weight = weight_of(), bias = weight_of();
    bonfire::layer_norm(signs, weight, bias, {.eps = 0}).backward(signs);
    expect_all(bias.grad().narrow(0, columns / 2, columns / 2), rows, "the layer norm's bias");
    expect_all(weight.grad(), rows, "the layer norm's weight");
    const Tensor rms_weight = weight_of();
    bonfire::rms_norm(signs, rms_weight, {.eps = 0}).backward(signs);
    expect_all(rms_weight.grad(), rows, "the RMS norm's weight");
  }
  // Products: the weight's gradient, the bias' and those behind a cut into q, k and v.
  {
    const Tensor weight = ones({columns, columns}), bias = weight_of();
    const Tensor out = bonfire::linear(ones({rows, columns}), weight, {.bias = bias});
    out.backward(at::ones_like(out));
    expect_all(weight.grad(), rows, "a product's weight");
    expect_all(bias.grad(), rows, "a product's bias");
    const Tensor packed_weight = ones({4 * columns, columns}), packed_bias = ones({4 * columns});
    const Tensor packed = bonfire::linear(ones({1, rows, columns}), packed_weight, {.bias = packed_bias});
    const auto [q, k, v] = split_qkv(packed, {.heads = 2, .kv_heads = 1});
    (q.sum() + k.sum() + v.sum()).backward();
    expect_all(packed_bias.grad(), rows, "the bias of a packed product");
    expect_all(bonfire::product(at::ones({3, rows}, options), at::ones({rows, 5}, options)), rows, "a product");
    // Into fp32: one that neither bf16 nor fp16 has.
    const Tensor into = at::zeros({3, 5}, options.dtype(at::kFloat));
    const Tensor left = at::ones({3, rows + 1}, options), right = at::ones({rows + 1, 5}, options);
    product_into(into, left, right, Writing::overwrite);
    expect_all(into, rows + 1, "a product in fp32");
    product_into(into, left, right, Writing::add);
    expect_all(into, 2 * rows + 2, "two products in fp32");
    const Tensor large = at::full({3, 256}, 200, options);  // 10 million: fp16 ends at 65,504
    product_into(into, large, large.t().narrow(1, 0, 1).expand({256, 5}), Writing::overwrite);
    expect_all(into, 256.0 * 200 * 200, "a large product in fp32");
  }
  // The embedding: into a gradient of its own, and into one that is there already, where either may be narrow.
  for (const auto& [rows_type, type] :
       {std::pair{check.type, check.type}, {check.type, at::kFloat}, {at::kFloat, check.type}}) {
    const Tensor tokens = at::zeros({4096}, options.dtype(at::kLong));
    const Tensor weight = at::ones({2, columns}, options.dtype(rows_type)).set_requires_grad(true);
    const Tensor out = bonfire::embedding(weight, tokens);
    out.backward(at::ones_like(out));
    expect_all(weight.grad()[0], 4096, "the embedding");
    expect_all(weight.grad()[1], 0, "the embedding");
    const auto sink = std::make_shared<Sink>(at::full({2, columns}, 1024, options.dtype(type)));
    const Tensor again = bonfire::embedding(weight, tokens, sink);
    again.backward(at::ones_like(again));
    expect_all(sink->place[0], 5120, "the embedding's buffer");
    expect_all(sink->place[1], 1024, "the embedding's buffer");
  }
  // The loss: logits of 0, so that both classes have a probability of a half.
  for (const std::int64_t bytes : {std::int64_t{1} << 30, std::int64_t{1} << 14}) {
    const Tensor weight = full({2, columns}, 0), target = at::zeros({rows}, options.dtype(at::kLong));
    bonfire::linear_cross_entropy(ones({rows, columns}), weight, target,
                                  {.loss = {.mean = false}, .most_logit_bytes = bytes})
        .backward();
    expect_all(weight.grad()[0], -0.5 * rows, "the head's weight");
    expect_all(weight.grad()[1], 0.5 * rows, "the head's weight");
  }
  // Attention that looks at all keys alike: each value's gradient is a sum over all queries.
  {
    constexpr std::int64_t sequence = 2048;
    const Tensor q = full({1, 1, sequence, 8}, 0), k = full({1, 1, sequence, 8}, 0), v = ones({1, 1, sequence, 8});
    const Tensor out = bonfire::attention(q, k, v, {.causal = false});
    out.backward(at::ones_like(out));
    EXPECT_LE((v.grad().to(at::kDouble) - 1).abs().max().item<double>(), 0x1p-7) << "the values";
  }
}

namespace {

using Number = long double;

Number sigmoid(Number x) { return 1 / (1 + std::exp(-x)); }
Number silu(Number x) { return x * sigmoid(x); }
Number silu_slope(Number x) { return sigmoid(x) * (1 + x * (1 - sigmoid(x))); }
constexpr Number k = 1.5957691216057307117597842397375L, cubic = 0.044715L;
Number gelu(Number x) { return x * sigmoid(k * (x + cubic * x * x * x)); }
Number gelu_slope(Number x) {
  const Number s = sigmoid(k * (x + cubic * x * x * x));
  return s + s * (1 - s) * x * k * (1 + 3 * cubic * x * x);
}

Tensor magnitudes(at::ScalarType type) {
  constexpr double infinity = std::numeric_limits<double>::infinity();
  std::vector<double> all{0, infinity, std::nan("")};
  for (const double x :
       {5e-324, 1e-310, 1e-45, 1e-40, 1.2e-38, 1e-30, 6e-8,  1e-5, 0.3, 1.0,  5.0,  13.0, 20.0, 31.0, 33.0,  80.0,  87.3,
        88.0,   88.7,   88.72, 88.73, 89.0,    100.0, 700.0, 1e4,  6e4, 1e10, 1e19, 1e25, 1e30, 3e38, 1e100, 1e160, 1e300})
    all.insert(all.end(), {x, -x});
  all.push_back(-infinity);
  return at::tensor(all, at::kDouble).to(type);
}

void expect_elements(const Tensor& got, const Tensor& x, const std::function<Number(Number)>& want_of,
                     const KernelCheck& check, const char* what) {
  const Tensor values = got.detach().to(at::kCPU, at::kDouble).flatten(), at = x.to(at::kCPU, at::kDouble).flatten();
  const Number largest = check.type == at::kDouble  ? std::numeric_limits<double>::max()
                         : check.type == at::kFloat ? std::numeric_limits<float>::max()
                         : check.type == at::kHalf  ? 65504
                                                    : 3.3895313892515355e38L;
  const Number relative = check.type == at::kDouble  ? 1e-12L
                          : check.type == at::kFloat ? 3e-5L
                                                     : tolerance_of(check.type) / 4;
  // Exponentials below the smallest normal number may be 0.
  const Number tiny = check.type == at::kDouble ? 1e-300L : check.type == at::kHalf ? 6e-8L : 1e-35L;
  for (std::int64_t i = 0; i < at.numel(); ++i) {
    const Number a = values[i].item<double>(), want = want_of(at[i].item<double>());
    const auto where = ::testing::Message()
                       << what << " of " << at[i].item<double>() << " in " << c10::toString(check.type) << ": "
                       << static_cast<double>(a) << " in place of " << static_cast<double>(want);
    if (std::isnan(want))
      EXPECT_TRUE(std::isnan(a)) << where;
    else if (std::isinf(want) || std::fabs(want) > largest)
      EXPECT_TRUE(std::isinf(a) && (a > 0) == (want > 0)) << where;
    else
      EXPECT_LE(std::fabs(a - want), relative * std::fabs(want) + tiny) << where;
  }
}

}  // namespace

void expect_activations_right_everywhere(const KernelCheck& check) {
  const Tensor x = magnitudes(check.type).to(check.device);
  const Tensor ones = at::ones_like(x), wide = at::cat({x, ones}).set_requires_grad(true);
  const Tensor out = bonfire::swiglu(wide);
  out.backward(ones);
  expect_elements(out, x, silu, check, "silu");
  expect_elements(wide.grad().narrow(0, 0, x.numel()), x, silu_slope, check, "silu's slope");
  expect_elements(wide.grad().narrow(0, x.numel(), x.numel()), x, silu, check, "the gradient of the other factor");
  const Tensor plain = x.clone().set_requires_grad(true), gelu_out = bonfire::gelu(plain);
  gelu_out.backward(ones);
  expect_elements(gelu_out, x, gelu, check, "gelu");
  expect_elements(plain.grad(), x, gelu_slope, check, "gelu's slope");
  // The same where the activation takes its gradient's place.
  const Tensor d = at::ones_like(x).view({1, -1}), row = x.view({1, -1});
  const auto gradient = activate_backward(Activation::gelu, d, row);
  expect_elements(gradient.wide, x, gelu_slope, check, "gelu's slope, with sums");
  // Two large factors and a small one.
  const Tensor gates = at::arange(-30.0, -10.0, at::kDouble).to(check.device, check.type);
  const double large = check.type == at::kDouble ? 1e308 : check.type == at::kHalf ? 3e4 : 1e38;
  for (const auto& [up, d_out] : {std::pair{large, 100.0}, {100.0, large}}) {
    const Tensor ups = at::full_like(gates, up), both = at::cat({gates, ups}).set_requires_grad(true);
    // As they are in this type.
    const Number factor = ups[0].item<double>(), given = at::full_like(gates, d_out)[0].item<double>();
    bonfire::swiglu(both).backward(at::full_like(gates, d_out));
    expect_elements(
        both.grad().narrow(0, 0, gates.numel()), gates, [&](Number x) { return silu_slope(x) * factor * given; }, check,
        "silu's slope times large factors");
    expect_elements(
        both.grad().narrow(0, gates.numel(), gates.numel()), gates, [&](Number x) { return silu(x) * given; }, check,
        "silu times a large factor");
  }
}

void expect_ignored_targets_give_nothing(const KernelCheck& check) {
  const auto options = at::TensorOptions(check.device).dtype(check.type);
  const Tensor target = at::full({2, 3}, -100, options.dtype(at::kLong));
  for (const bool mean : {false, true}) {
    const auto expect_nothing = [&](const Tensor& loss, std::initializer_list<Tensor> inputs) {
      loss.backward();
      EXPECT_EQ(std::isnan(loss.item<double>()), mean);
      EXPECT_TRUE(mean || loss.item<double>() == 0);
      for (const Tensor& input : inputs) EXPECT_TRUE((input.grad() == 0).all().item<bool>()) << input.grad();
    };
    const auto random = [&](at::IntArrayRef sizes) { return at::randn(sizes, options).set_requires_grad(true); };
    const Tensor logits = random({2, 3, 40});
    expect_nothing(bonfire::cross_entropy(logits, target, {.mean = mean}), {logits});
    for (const std::int64_t bytes : {1 << 20, 100}) {
      const Tensor x = random({2, 3, 16}), weight = random({40, 16});
      expect_nothing(bonfire::linear_cross_entropy(x, weight, target, {.loss = {.mean = mean}, .most_logit_bytes = bytes}),
                     {x, weight});
    }
  }
}

}  // namespace bonfire::testing
