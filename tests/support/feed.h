#pragma once

#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include "bonfire/kernels/fused_linear.h"
#include "tests/support/kernel_check.h"

// What tests of fused products share: the feed-forward half of a block in several shapes, and how results are compared.
namespace bonfire::testing {

using at::Tensor;

inline Tensor normed(const Tensor& x, const Tensor& weight, const Tensor& bias) {
  if (bias.defined()) return at::layer_norm(x, {x.size(-1)}, weight, bias, 1e-5);
  return x / (x * x).mean(-1, true).add(1e-5).sqrt() * weight;
}

inline Tensor activated(const Tensor& wide, Activation activation) {
  if (activation == Activation::gelu) return at::gelu(wide, "tanh");
  const auto halves = wide.chunk(2, -1);
  return at::silu(halves[0]) * halves[1];
}

// A feed-forward part: x, norm weight and bias, up weight and bias, down weight and bias.
struct Feed {
  Activation activation;
  bool centered, biased;
  std::int64_t rows, dim, ffn;
  bool keep = false;

  Tensors inputs() const {
    const std::int64_t wide = activation == Activation::swiglu ? 2 * ffn : ffn;
    const auto root = [](std::int64_t n) { return std::sqrt(static_cast<double>(n)); };
    return {at::randn({2, rows, dim}), at::randn({dim}),
            at::randn({dim}),          at::randn({wide, dim}) / root(dim),
            at::randn({wide}),         at::randn({dim, ffn}) / root(ffn),
            at::randn({dim})};
  }
  Tensor bias(const Tensor& given) const { return biased ? given : given * 0; }
  LinearOptions options(const Tensor& given) const { return {.bias = biased ? given : Tensor(), .keep = keep}; }
  Tensor unused(const Tensors& t) const {  // so that every input has a gradient
    Tensor sum = at::zeros({}, t[0].options().requires_grad(false));
    if (!centered) sum = sum + (t[2] * 0).sum();
    if (!biased) sum = sum + (t[4] * 0).sum() + (t[6] * 0).sum();
    return sum;
  }

  FeedForwardParts all(const Tensors& t) const {
    return {.norm = {.weight = t[1], .bias = centered ? t[2] : Tensor()},
            .up = t[3],
            .up_options = options(t[4]),
            .activation = activation,
            .down = t[5],
            .down_options = options(t[6])};
  }
  Tensors fused(const Tensors& t) const { return {feed_forward(t[0], all(t)).out + unused(t)}; }
  Tensors parts(const Tensors& t) const {
    const auto [norm, stream] = centered ? layer_norm_stream(t[0], t[1], t[2], {}) : rms_norm_stream(t[0], {}, t[1], {});
    const Tensor wide = bonfire::linear(norm, t[3], options(t[4]));
    auto down = options(t[6]);
    down.residual = stream;
    return {bonfire::linear(activation == Activation::swiglu ? bonfire::swiglu(wide) : bonfire::gelu(wide), t[5], down) +
            unused(t)};
  }
  Tensors reference(const Tensors& t) const {
    Tensor wide = at::linear(normed(t[0], t[1], centered ? t[2] : Tensor()), t[3]);
    if (biased) wide = wide + t[4];
    Tensor out = at::linear(activated(wide, activation), t[5]) + t[0];
    if (biased) out = out + t[6];
    return {out + unused(t)};
  }
};

inline std::vector<Feed> feeds() {
  std::vector<Feed> all;
  for (const auto activation : {Activation::swiglu, Activation::gelu})
    for (const bool centered : {false, true})
      for (const bool biased : {false, true})
        for (const auto& [rows, dim, ffn] :
             {std::tuple<std::int64_t, std::int64_t, std::int64_t>{1, 7, 5}, {37, 64, 48}, {150, 40, 33}})
          all.push_back({activation, centered, biased, rows, dim, ffn});
  return all;
}

inline ::testing::Message name(const Feed& feed) {
  return ::testing::Message() << (feed.activation == Activation::swiglu ? "swiglu" : "gelu")
                              << (feed.centered ? ", centered" : "") << (feed.biased ? ", biased" : "")
                              << (feed.keep ? ", kept" : "") << ", " << feed.rows << " rows of " << feed.dim;
}

inline Tensors on(const KernelCheck& check, const Tensors& given) {
  Tensors out;
  for (const Tensor& t : given) out.push_back(t.to(check.device, check.type, false, true).set_requires_grad(true));
  return out;
}

inline Tensors gradients_of(const Tensors& outputs, const Tensors& inputs, const Tensor& weight) {
  outputs[0].backward(weight);
  Tensors out;
  for (const Tensor& t : inputs) out.push_back(t.grad());
  return out;
}

inline double relative_error(const Tensor& got, const Tensor& want) {
  const Tensor a = got.detach().to(at::kCPU, at::kDouble), b = want.detach().to(at::kCPU, at::kDouble);
  return ((a - b).norm() / b.norm()).item<double>();
}

// An operator of ours by its name.
template <class Signature, class... Arguments>
auto call(const char* name, Arguments... arguments) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>().call(arguments...);
}

}  // namespace bonfire::testing
