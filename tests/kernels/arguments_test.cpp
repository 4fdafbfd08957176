// Every operator looks at what it is given before it reads it, whatever the type: kernels trust the shapes.
#include <gtest/gtest.h>

#include <functional>

#include <ATen/ATen.h>

#include "bonfire/base/error.h"
#include "bonfire/kernels/activated_product.h"
#include "bonfire/kernels/attention.h"
#include "bonfire/kernels/cross_entropy.h"
#include "bonfire/kernels/embedding.h"
#include "bonfire/kernels/fused_linear.h"
#include "bonfire/kernels/gemm.h"
#include "bonfire/kernels/quantized_activation.h"
#include "bonfire/kernels/scaled_weight.h"
#include "bonfire/kernels/self_attention.h"

namespace bonfire::arguments_test {
namespace {

using at::Tensor;

class Arguments : public ::testing::TestWithParam<at::ScalarType> {
 protected:
  static Tensor of(at::IntArrayRef sizes) { return at::ones(sizes, GetParam()); }
  static Tensor classes(at::IntArrayRef sizes) { return at::zeros(sizes, at::kLong); }

  // By a message of ours that has all of `words`.
  static void expect_refused(const std::function<void()>& call, std::initializer_list<const char*> words) {
    try {
      call();
    } catch (const Error& error) {
      for (const char* word : words)
        EXPECT_NE(std::string(error.what()).find(word), std::string::npos) << "'" << word << "' in: " << error.what();
      return;
    } catch (const std::exception& error) {
      ADD_FAILURE() << "not by its own check: " << error.what();
      return;
    }
    ADD_FAILURE() << "taken; expected a message with " << *words.begin();
  }
};
INSTANTIATE_TEST_SUITE_P(Types, Arguments, ::testing::Values(at::kDouble, at::kFloat, at::kBFloat16, at::kHalf),
                         [](const auto& info) { return std::string(c10::toString(info.param)); });

TEST_P(Arguments, OfProducts) {
  const Tensor x = of({2, 5, 16}), weight = of({32, 16});
  const auto refused = [&](const LinearOptions& options, const char* name, const char* shape) {
    expect_refused([&] { bonfire::linear(x, weight, options); }, {"linear", name, shape});
  };
  refused({.bias = of({31})}, "bias", "[31]");
  refused({.bias = of({33})}, "bias", "[33]");
  refused({.bias = of({1})}, "bias", "[1]");
  refused({.bias = of({1, 32})}, "bias", "[1, 32]");
  refused({.residual = of({2, 5, 31})}, "residual", "[2, 5, 31]");
  refused({.residual = of({2, 4, 32})}, "residual", "[2, 4, 32]");
  refused({.residual = of({10, 32})}, "residual", "[10, 32]");
  refused({.residual = of({1, 32})}, "residual", "[1, 32]");
  expect_refused([&] { bonfire::linear(x, of({32, 15}), {}); }, {"linear", "weight", "[32, 15]", "[2, 5, 16]"});
  expect_refused([&] { bonfire::linear(x, of({16}), {}); }, {"linear", "weight", "[16]"});
  expect_refused([&] { bonfire::linear(x, Tensor(), {}); }, {"linear", "weight", "undefined"});
  expect_refused([&] { bonfire::linear(of({}), weight, {}); }, {"linear", "x"});

  const Tensor a = of({3, 16}), b = of({16, 5});
  expect_refused([&] { product(a, of({15, 5})); }, {"product", "b", "[15, 5]"});
  expect_refused([&] { product(a, b, {.bias = of({4})}); }, {"product", "bias", "[4]"});
  expect_refused([&] { product(a, b, {.residual = of({2, 5})}); }, {"product", "residual", "[2, 5]"});
  for (const auto writing : {Writing::overwrite, Writing::add}) {
    expect_refused([&] { product_into(of({3, 4}), a, b, writing); }, {"product_into", "out", "[3, 4]"});
    expect_refused([&] { product_into(of({5}), a, b, writing); }, {"product_into", "out", "[5]"});
    expect_refused([&] { product_into(of({3, 5}), a, of({17, 5}), writing); }, {"product_into", "b", "[17, 5]"});
  }
  expect_refused([&] { column_sums(of({4})); }, {"column_sums", "[4]"});
  for (const auto activation : {Activation::swiglu, Activation::gelu}) {
    expect_refused([&] { activated_product(activation, a, of({4, 15}), {}); }, {"activated_product", "weight", "[4, 15]"});
    expect_refused([&] { activated_product(activation, a, of({4, 16}), of({3})); }, {"activated_product", "bias", "[3]"});
    expect_refused(
        [&] {
          activated_product_backward(activation, {.dy = a, .weight = of({16, 5}), .wide = of({3, 6})});
        },
        {"activated_product_backward", "wide", "[3, 6]"});
  }
  expect_refused([&] { activated_product(Activation::swiglu, a, of({5, 16}), {}); }, {"activated_product", "5 rows"});
}

TEST_P(Arguments, OfFusedProducts) {
  const Tensor x = of({2, 5, 16}), norm = of({16}), weight = of({32, 16}), down = of({8, 16});
  const auto normed = [&](const NormWeights& norms, const Tensor& w, const LinearOptions& options,
                          std::initializer_list<const char*> words) {
    expect_refused([&] { normed_linear(x, norms, w, options); }, words);
  };
  normed({.weight = of({15})}, weight, {}, {"normed_linear", "weight", "[15]"});
  normed({.weight = of({32})}, weight, {}, {"normed_linear", "weight", "[32]"});
  normed({.weight = norm, .bias = of({1})}, weight, {}, {"normed_linear", "bias", "[1]"});
  normed({.weight = norm}, of({32, 17}), {}, {"normed_linear", "weight", "[32, 17]"});
  normed({.weight = norm}, weight, {.bias = of({31})}, {"normed_linear", "bias", "[31]"});
  normed({.weight = norm}, weight, {.residual = x}, {"normed_linear", "residual"});

  const auto fed = [&](const FeedForwardParts& parts, std::initializer_list<const char*> words) {
    expect_refused([&] { feed_forward(x, parts); }, words);
  };
  const Tensor back = of({16, 16});
  fed({.norm = {.weight = of({15})}, .up = weight, .down = back}, {"feed_forward", "weight", "[15]"});
  fed({.norm = {.weight = norm, .bias = of({1})}, .up = weight, .down = back}, {"feed_forward", "bias", "[1]"});
  fed({.up = of({32, 17}), .down = back}, {"feed_forward", "weight up", "[32, 17]"});
  fed({.up = of({33, 16}), .down = back}, {"feed_forward", "33"});
  fed({.up = weight, .up_options = {.bias = of({31})}, .down = back}, {"feed_forward", "bias up", "[31]"});
  fed({.up = weight, .activation = Activation::gelu, .down = back}, {"feed_forward", "weight down", "[16, 16]"});
  fed({.up = weight, .down = back, .down_options = {.bias = of({7})}}, {"feed_forward", "bias down", "[7]"});
  fed({.up = weight, .down = back, .down_options = {.residual = x}}, {"feed_forward", "residual"});
  fed({.up = weight, .down = down}, {"feed_forward", "8 rows"});
}

TEST_P(Arguments, OfNorms) {
  const Tensor x = of({2, 5, 16}), weight = of({16});
  expect_refused([&] { rms_norm(x, of({15}), {}); }, {"rms_norm", "weight", "[15]", "[2, 5, 16]"});
  expect_refused([&] { rms_norm(x, of({4, 4}), {}); }, {"rms_norm", "weight", "[4, 4]"});
  expect_refused([&] { rms_norm_stream(x, of({2, 4, 16}), weight, {}); }, {"rms_norm", "residual", "[2, 4, 16]"});
  expect_refused([&] { rms_norm_stream(x, of({16}), weight, {}); }, {"rms_norm", "residual", "[16]"});
  expect_refused([&] { rms_norm_stream(x, of({2, 5, 17}), weight, {}); }, {"rms_norm", "residual", "[2, 5, 17]"});
  const auto other = GetParam() == at::kFloat ? at::kDouble : at::kFloat;
  expect_refused([&] { rms_norm_stream(x, x.to(other), weight, {}); }, {"rms_norm", "residual", c10::toString(other)});
  expect_refused([&] { layer_norm(x, of({15}), of({16}), {}); }, {"layer_norm", "weight", "[15]"});
  expect_refused([&] { layer_norm_stream(x, weight, of({1}), {}); }, {"layer_norm", "bias", "[1]"});
  expect_refused([&] { layer_norm(of({}), weight, weight, {}); }, {"layer_norm", "x"});
}

TEST_P(Arguments, OfActivations) {
  expect_refused([&] { swiglu(of({3, 5})); }, {"swiglu", "5"});
  expect_refused([&] { swiglu(of({})); }, {"swiglu"});
  expect_refused([&] { activate(Activation::swiglu, of({3, 5})); }, {"activate", "5"});
  expect_refused([&] { activate(Activation::gelu, of({6, 4}).t()); }, {"activate", "contiguous"});
  for (const auto activation : {Activation::swiglu, Activation::gelu}) {
    expect_refused([&] { activate_backward(activation, of({3, 7}), of({3, 6})); }, {"activate_backward", "[3, 7]"});
    expect_refused([&] { activate_backward(activation, of({2, 6}), of({3, 6})); }, {"activate_backward", "[2, 6]"});
  }
  expect_refused(
      [&] {
        activate_backward(Activation::gelu, of({3, 6}), of({6, 3}).t());
      },
      {"activate_backward", "contiguous"});
}

TEST_P(Arguments, OfAttention) {
  const Tensor q = of({2, 4, 9, 8}), k = of({2, 2, 9, 8});
  for (const bool causal : {true, false}) {
    const auto refused = [&](const Tensor& keys, const Tensor& values, std::initializer_list<const char*> words) {
      expect_refused([&] { attention(q, keys, values, {.causal = causal}); }, words);
    };
    refused(of({1, 2, 9, 8}), of({1, 2, 9, 8}), {"attention", "k", "[1, 2, 9, 8]"});
    refused(of({2, 2, 9, 7}), of({2, 2, 9, 7}), {"attention", "k", "[2, 2, 9, 7]"});
    refused(k, of({2, 2, 8, 8}), {"attention", "v", "[2, 2, 8, 8]"});
    refused(of({2, 3, 9, 8}), of({2, 3, 9, 8}), {"attention", "4 heads", "3"});
    refused(of({2, 0, 9, 8}), of({2, 0, 9, 8}), {"attention", "4 heads", "0"});
    refused(of({2, 9, 8}), of({2, 9, 8}), {"attention", "k", "[2, 9, 8]"});
  }
  expect_refused([&] { attention(of({4, 9, 8}), k, k, {}); }, {"attention", "q", "[4, 9, 8]"});

  const QkvLayout plain{.heads = 4, .kv_heads = 2};
  const auto cut = [&](const Tensor& qkv, const QkvLayout& layout, std::initializer_list<const char*> words) {
    expect_refused([&] { split_qkv(qkv, layout); }, words);
    expect_refused([&] { turned_qkv(qkv, layout); }, words);
    expect_refused([&] { self_attention(qkv, layout, {}); }, words);
  };
  cut(of({2, 9, 63}), plain, {"split_qkv", "63"});
  cut(of({9, 64}), plain, {"split_qkv", "[9, 64]"});
  cut(of({2, 9, 64}), {.heads = 4, .kv_heads = 0}, {"split_qkv", "4 heads", "0"});
  cut(of({2, 9, 90}), {.heads = 4, .kv_heads = 3}, {"split_qkv", "4 heads", "3"});
  const auto type = GetParam() == at::kDouble ? at::kDouble : at::kFloat;
  const auto turned = [&](std::int64_t positions, std::int64_t half) {
    QkvLayout layout = plain;
    layout.rotary = {at::ones({positions, half}, type), at::ones({positions, half}, type)};
    return layout;
  };
  cut(of({2, 9, 8 * 5}), turned(9, 2), {"split_qkv", "size 5"});
  cut(of({2, 9, 8 * 6}), turned(9, 2), {"split_qkv", "cosines", "[9, 2]"});
  cut(of({2, 9, 8 * 6}), turned(8, 3), {"9 tokens", "8 positions"});
  QkvLayout uneven = turned(9, 3);
  uneven.rotary.sine = at::ones({8, 3}, type);
  cut(of({2, 9, 8 * 6}), uneven, {"split_qkv", "sines", "[8, 3]"});
  expect_refused([&] { rotary_table({.positions = 3, .head_dim = 5}, at::TensorOptions(type)); }, {"rotary_table", "5"});
}

// Our own kernels, whatever torch's are taken for.
TEST(Arguments, OfOwnAttention) {
  if (!cpu::can_multiply()) GTEST_SKIP() << "this machine has no AVX-512";
  const Tensor q = at::ones({2, 4, 9, 8}), k = at::ones({2, 2, 9, 8});
  EXPECT_THROW(cpu::causal_attention(q, at::ones({2, 2, 8, 8}), at::ones({2, 2, 8, 8})), Error);
  EXPECT_THROW(cpu::causal_attention(q, k, at::ones({2, 2, 8, 8})), Error);
  EXPECT_THROW(cpu::causal_attention(q, k.transpose(1, 2).contiguous().transpose(1, 2), k), Error);
  const auto [out, log_sums] = cpu::causal_attention(q, k, k);
  EXPECT_THROW(cpu::causal_attention_backward(at::ones({2, 9, 31}), {q, k, k, out, log_sums}), Error);
  EXPECT_THROW(cpu::causal_attention_backward(out, {q, k, k, out, at::ones({2, 4, 8})}), Error);
}

TEST_P(Arguments, OfLosses) {
  const Tensor logits = of({2, 5, 9}), x = of({2, 5, 16}), weight = of({9, 16});
  for (const Tensor& target : {classes({2, 4}), classes({5, 2}), classes({10}), classes({2, 5, 1})}) {
    expect_refused([&] { cross_entropy(logits, target, {}); }, {"cross_entropy", "target", "[2, 5]"});
    for (const std::int64_t bytes : {std::int64_t{1} << 20, std::int64_t{1}})
      expect_refused([&] { linear_cross_entropy(x, weight, target, {.most_logit_bytes = bytes}); },
                     {"linear_cross_entropy", "target", "[2, 5]"});
  }
  const Tensor target = classes({2, 5});
  expect_refused([&] { linear_cross_entropy(x, of({9, 15}), target, {}); }, {"linear_cross_entropy", "[9, 15]"});
  expect_refused([&] { linear_cross_entropy(x, of({0, 16}), target, {}); }, {"linear_cross_entropy", "0 classes"});
  expect_refused([&] { cross_entropy(of({2, 5, 0}), target, {}); }, {"cross_entropy", "0 classes"});
  for (const auto type : {at::kFloat, at::kDouble, at::kBool})
    expect_refused([&] { cross_entropy(logits, target.to(type), {}); }, {"cross_entropy", "whole numbers"});
  for (const std::int64_t wrong : {9, -1, -99}) {
    Tensor some = classes({2, 5});
    some[1][3] = wrong;
    const std::string named = "target 8 is " + std::to_string(wrong);
    expect_refused([&] { cross_entropy(logits, some, {}); }, {named.c_str(), "0 to 8"});
    for (const std::int64_t bytes : {std::int64_t{1} << 20, std::int64_t{1}})
      expect_refused([&] { linear_cross_entropy(x, weight, some, {.most_logit_bytes = bytes}); }, {"0 to 8"});
  }
}

TEST_P(Arguments, OfEmbeddings) {
  const Tensor weight = of({7, 4});
  expect_refused([&] { bonfire::embedding(of({7}), classes({3})); }, {"embedding", "weight", "[7]"});
  expect_refused([&] { bonfire::embedding(weight, at::ones({3}, at::kFloat)); }, {"embedding", "tokens", "whole numbers"});
  for (const std::int64_t wrong : {-1, 7})
    expect_refused([&] { bonfire::embedding(weight, at::full({2, 3}, wrong, at::kLong)); }, {"embedding", "0 to 6"});
}

TEST(Arguments, OfEightBits) {
  const auto refused = [](const std::function<void()>& call) { EXPECT_THROW(call(), Error); };
  const auto ones = [](std::int64_t n) { return at::ones({n}); };
  const auto eight = [](std::int64_t n) { return at::empty({n}, at::kFloat8_e4m3fn); };
  refused([&] { note_magnitudes(ones(3), {.elements = ones(64), .each = 16}); });
  refused([&] { note_magnitudes(ones(4), {.elements = ones(64), .first = 16, .each = 16}); });
  refused([&] { note_magnitudes(ones(4), {.elements = ones(64), .each = 0}); });
  refused([&] { note_magnitudes(ones(4).to(at::kDouble), {.elements = ones(64), .each = 16}); });
  refused([&] { note_magnitudes(ones(4), {.elements = at::ones({4, 16}), .each = 16}); });
  refused([&] { round_scaled(eight(63), {.elements = ones(64), .each = 16}, ones(4)); });
  refused([&] { round_scaled(ones(64), {.elements = ones(64), .each = 16}, ones(4)); });
  refused([&] { unscaled_weight(eight(64).view({4, 16}), ones(3), at::kFloat); });
  refused([&] { transposed_weight(eight(64)); });
  const auto wide = [](std::int64_t columns) { return at::ones({16, columns}, at::kBFloat16); };
  const KnownScale scale{.history = at::zeros({4})};
  refused([&] { quantized_swiglu(wide(33), scale, false); });
  refused([&] { quantized_swiglu_backward(wide(32), wide(32), {.gradient = scale}); });
}

}  // namespace
}  // namespace bonfire::arguments_test
