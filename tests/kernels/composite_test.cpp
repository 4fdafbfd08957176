#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include "bonfire/kernels/optimizer.h"

// Each operator has a composition of torch's operators for devices without a kernel of ours. Here it is called as such a
// device would reach it, with tensors that the CPU kernel can check.
namespace bonfire::composite_test {
namespace {

using at::Tensor;
using Optional = std::optional<Tensor>;

template <class Signature, class... Arguments>
auto composite(const char* name, Arguments... arguments) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>().redispatch(
      c10::DispatchKeySet(c10::DispatchKey::CUDA), arguments...);
}

template <class Signature, class... Arguments>
auto kernel(const char* name, Arguments... arguments) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>().call(arguments...);
}

void expect_close(const Tensor& a, const Tensor& b) {
  ASSERT_EQ(a.sizes(), b.sizes());
  ASSERT_EQ(a.scalar_type(), b.scalar_type());
  EXPECT_TRUE(at::allclose(a, b, 1e-12, 1e-12)) << (a - b).abs().max().item<double>();
}

template <class Tuple>
void expect_all_close(const Tuple& a, const Tuple& b) {
  std::apply([&](const auto&... x) { std::apply([&](const auto&... y) { (expect_close(x, y), ...); }, b); }, a);
}

Tensor random(at::IntArrayRef sizes) { return at::randn(sizes, at::kDouble); }

TEST(Composite, RmsNorm) {
  using Forward = std::tuple<Tensor, Tensor, Tensor>(const Tensor&, const Optional&, const Tensor&, double);
  using Backward =
      std::tuple<Tensor, Tensor, Tensor>(const Tensor&, const Optional&, const Tensor&, const Tensor&, const Tensor&, bool);
  const Tensor x = random({3, 5, 7}), weight = random({7}), dy = random({3, 5, 7});
  for (const Optional& extra : {Optional(), Optional(random({3, 5, 7}))}) {
    const auto out = kernel<Forward>("bonfire::rms_norm", x, extra, weight, 1e-5);
    expect_all_close(composite<Forward>("bonfire::rms_norm", x, extra, weight, 1e-5), out);
    const Tensor rstd = std::get<2>(out);
    for (const bool again : {false, true})
      expect_all_close(composite<Backward>("bonfire::rms_norm_backward", dy, extra, x, weight, rstd, again),
                       kernel<Backward>("bonfire::rms_norm_backward", dy, extra, x, weight, rstd, again));
  }
}

TEST(Composite, LayerNorm) {
  using Forward = std::tuple<Tensor, Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, double);
  using Backward = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>(
      const Tensor&, const Optional&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Optional&, bool);
  const Tensor x = random({3, 200, 7}), weight = random({7}), bias = random({7}), dy = random({3, 200, 7});
  const auto out = kernel<Forward>("bonfire::layer_norm", x, weight, bias, 1e-5);
  expect_all_close(composite<Forward>("bonfire::layer_norm", x, weight, bias, 1e-5), out);
  const auto& [normed, mean, rstd] = out;
  for (const Optional& extra : {Optional(), Optional(random({3, 200, 7}))})
    for (const Optional& again : {Optional(), Optional(bias)})
      for (const bool sums : {false, true}) {
        const auto d = kernel<Backward>("bonfire::layer_norm_backward", dy, extra, x, weight, mean, rstd, again, sums);
        expect_all_close(composite<Backward>("bonfire::layer_norm_backward", dy, extra, x, weight, mean, rstd, again, sums),
                         d);
        EXPECT_TRUE(!again || std::get<3>(d).equal(normed));
      }
}

TEST(Composite, Products) {
  using Product = Tensor(const Tensor&, const Tensor&, const Optional&, const Optional&);
  using Into = void(Tensor, const Tensor&, const Tensor&, bool);
  const Tensor a = random({5, 7}), b = random({7, 3}), out = random({5, 3});
  for (const Optional& bias : {Optional(), Optional(random({3}))})
    for (const Optional& residual : {Optional(), Optional(random({5, 3}))})
      for (const auto& [left, right, extra, rest] :
           {std::tuple(a, b, bias, residual),
            std::tuple(a.to(at::kFloat), b.to(at::kFloat), bias ? Optional(bias->to(at::kFloat)) : Optional(),
                       residual ? Optional(residual->to(at::kFloat)) : Optional())}) {
        Tensor want = at::matmul(left, right);
        if (extra) want = want + *extra;
        if (rest) want = want + *rest;
        EXPECT_TRUE(at::allclose(composite<Product>("bonfire::product", left, right, extra, rest), want, 1e-5, 1e-6));
        EXPECT_TRUE(at::allclose(kernel<Product>("bonfire::product", left, right, extra, rest), want, 1e-5, 1e-6));
      }
  for (const auto type : {at::kDouble, at::kFloat, at::kBFloat16})
    for (const bool accumulate : {false, true}) {
      const Tensor left = a.to(type), right = b.to(type);
      const auto wide = type == at::kBFloat16 ? at::kFloat : type;
      Tensor first = out.to(wide).clone(), second = first.clone();
      composite<Into>("bonfire::product_into_", first, left, right, accumulate);
      kernel<Into>("bonfire::product_into_", second, left, right, accumulate);
      Tensor want = at::matmul(left.to(at::kDouble), right.to(at::kDouble));
      if (accumulate) want = want + out.to(wide);
      const double tolerance = type == at::kDouble ? 1e-13 : 1e-6;  // bf16 too: the sum is fp32's
      EXPECT_TRUE(at::allclose(first.to(at::kDouble), want, tolerance, tolerance));
      EXPECT_TRUE(at::allclose(second.to(at::kDouble), want, tolerance, tolerance));
    }
}

TEST(Composite, Qkv) {
  using Split =
      std::tuple<Tensor, Tensor, Tensor>(const Tensor&, const Optional&, const Optional&, std::int64_t, std::int64_t);
  using Merge = Tensor(const Tensor&, const Tensor&, const Tensor&, const Optional&, const Optional&);
  const Tensor qkv = random({2, 5, 8 * 6}), angle = random({9, 3});
  for (const bool rotated : {false, true}) {
    const Optional cosine = rotated ? Optional(angle.cos()) : std::nullopt,
                   sine = rotated ? Optional(angle.sin()) : std::nullopt;
    const auto parts = kernel<Split>("bonfire::split_qkv", qkv, cosine, sine, 4, 2);
    expect_all_close(composite<Split>("bonfire::split_qkv", qkv, cosine, sine, 4, 2), parts);
    const auto& [q, k, v] = parts;
    expect_close(composite<Merge>("bonfire::merge_qkv", q, k, v, cosine, sine), qkv);
    expect_close(kernel<Merge>("bonfire::merge_qkv", q, k, v, cosine, sine), qkv);
  }
  using TurnBack = void(Tensor, const Tensor&, const Tensor&, std::int64_t, std::int64_t);
  const auto [q, k, v] = kernel<Split>("bonfire::split_qkv", qkv, angle.cos(), angle.sin(), 4, 2);
  const Tensor turned = kernel<Merge>("bonfire::merge_qkv", q, k, v, std::nullopt, std::nullopt);
  composite<TurnBack>("bonfire::turn_back_qkv_", turned, angle.cos(), angle.sin(), 4, 2);
  expect_close(turned, qkv);
}

TEST(Composite, Activations) {
  using Unary = Tensor(const Tensor&);
  using Backward = Tensor(const Tensor&, const Tensor&);
  const Tensor x = random({4, 10}), d = random({4, 5});
  expect_close(composite<Unary>("bonfire::swiglu", x), kernel<Unary>("bonfire::swiglu", x));
  expect_close(composite<Backward>("bonfire::swiglu_backward", d, x), kernel<Backward>("bonfire::swiglu_backward", d, x));
  expect_close(composite<Unary>("bonfire::gelu", x), kernel<Unary>("bonfire::gelu", x));
  expect_close(composite<Backward>("bonfire::gelu_backward", x, x), kernel<Backward>("bonfire::gelu_backward", x, x));
  // Those that leave the activation in place of its gradient.
  using Exchange = Tensor(Tensor, const Tensor&);
  using ExchangeAndSum = std::tuple<Tensor, Tensor>(Tensor, const Tensor&);
  const Tensor first = d.clone(), second = d.clone(), third = x.clone(), fourth = x.clone();
  expect_close(composite<Exchange>("bonfire::swiglu_backward_", first, x),
               kernel<Exchange>("bonfire::swiglu_backward_", second, x));
  expect_all_close(composite<ExchangeAndSum>("bonfire::gelu_backward_", third, x),
                   kernel<ExchangeAndSum>("bonfire::gelu_backward_", fourth, x));
  expect_close(first, second);
  expect_close(third, fourth);
  expect_close(first, kernel<Unary>("bonfire::swiglu", x));
  expect_close(third, kernel<Unary>("bonfire::gelu", x));
}

TEST(Composite, CrossEntropy) {
  using Losses = Tensor(const Tensor&, const Tensor&, std::int64_t);
  using Gradients = Tensor(Tensor, const Tensor&, std::int64_t);
  const Tensor logits = random({6, 9});
  Tensor target = at::randint(9, {6}, at::kLong);
  target[2] = -100;
  expect_close(composite<Losses>("bonfire::cross_entropy", logits, target, -100),
               kernel<Losses>("bonfire::cross_entropy", logits, target, -100));
  Tensor a = logits.clone(), b = logits.clone();
  expect_close(composite<Gradients>("bonfire::cross_entropy_", a, target, -100),
               kernel<Gradients>("bonfire::cross_entropy_", b, target, -100));
  expect_close(a, b);
}

TEST(Composite, DropoutAndEmbedding) {
  using Dropout = Tensor(const Tensor&, double, std::int64_t, std::int64_t);
  using Add = void(Tensor, const Tensor&, const Tensor&);
  const Tensor x = random({5, 77});
  expect_close(composite<Dropout>("bonfire::dropout", x, 0.3, 12345, 17),
               kernel<Dropout>("bonfire::dropout", x, 0.3, 12345, 17));
  const Tensor tokens = at::randint(4, {5}, at::kLong);
  Tensor a = at::zeros({4, 77}, at::kDouble), b = a.clone();
  composite<Add>("bonfire::embedding_add_", a, tokens, x);
  kernel<Add>("bonfire::embedding_add_", b, tokens, x);
  expect_close(a, b);
}

TEST(Composite, Optimizers) {
  using Adam = void(Tensor, const Tensor&, Tensor, Tensor, const Optional&, const Optional&, const Optional&,
                    const Optional&, at::ArrayRef<double>);
  using Sgd =
      void(Tensor, const Tensor&, const Optional&, const Optional&, const Optional&, const Optional&, at::ArrayRef<double>);
  const Tensor g = random({50}), scale = at::scalar_tensor(0.5, at::kDouble);
  for (const bool decoupled : {false, true}) {
    std::vector<Tensor> a, b;
    for (int i = 0; i < 5; ++i) {
      a.push_back(random({50}).abs());
      b.push_back(a.back().clone());
    }
    const auto numbers = numbers_of(
        AdamStep{.lr = 0.1, .beta2 = 0.99, .weight_decay = 0.1, .step = 3, .gradient_scale = 0.7, .decoupled = decoupled});
    composite<Adam>("bonfire::adam_", a[0], g, a[1], a[2], Optional(a[3]), Optional(a[4]), Optional(scale), Optional(),
                    numbers);
    kernel<Adam>("bonfire::adam_", b[0], g, b[1], b[2], Optional(b[3]), Optional(b[4]), Optional(scale), Optional(),
                 numbers);
    for (std::size_t i = 0; i < a.size(); ++i) expect_close(a[i], b[i]);
  }
  for (const std::int64_t step : {1, 2}) {
    Tensor p = random({50}), m = random({50}), p2 = p.clone(), m2 = m.clone();
    const auto numbers = numbers_of(SgdStep{.lr = 0.1,
                                            .momentum = 0.9,
                                            .dampening = 0.1,
                                            .weight_decay = 0.01,
                                            .step = step,
                                            .gradient_scale = 0.7,
                                            .nesterov = true});
    composite<Sgd>("bonfire::sgd_", p, g, Optional(m), Optional(), Optional(scale), Optional(), numbers);
    kernel<Sgd>("bonfire::sgd_", p2, g, Optional(m2), Optional(), Optional(scale), Optional(), numbers);
    expect_close(p, p2);
    expect_close(m, m2);
  }
  using Squares = Tensor(at::TensorList);
  const std::vector<Tensor> tensors{g, random({3, 7})};
  expect_close(composite<Squares>("bonfire::sum_of_squares", at::TensorList(tensors)),
               kernel<Squares>("bonfire::sum_of_squares", at::TensorList(tensors)));
}

}  // namespace
}  // namespace bonfire::composite_test
