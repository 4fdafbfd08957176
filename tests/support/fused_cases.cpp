#include "tests/support/fused_cases.h"

#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include "bonfire/kernels/fp8.h"
#include "bonfire/kernels/fused_linear.h"

namespace bonfire::testing {
namespace {

using at::Tensor;

Tensor normed(const Tensor& x, const Tensor& weight, const Tensor& bias) {
  if (bias.defined()) return at::layer_norm(x, {x.size(-1)}, weight, bias, 1e-5);
  return x / (x * x).mean(-1, true).add(1e-5).sqrt() * weight;
}

Tensor activated(const Tensor& wide, Activation activation) {
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

  Tensors fused(const Tensors& t) const {
    const auto known = std::make_shared<KnownSums>();
    const auto [wide, stream] =
        normed_linear(t[0], {.weight = t[1], .bias = centered ? t[2] : Tensor()}, t[3], options(t[4]), known);
    auto down = options(t[6]);
    down.residual = stream;
    return {activated_linear(wide, activation, t[5], down, known) + unused(t)};
  }
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

std::vector<Feed> feeds() {
  std::vector<Feed> all;
  for (const auto activation : {Activation::swiglu, Activation::gelu})
    for (const bool centered : {false, true})
      for (const bool biased : {false, true})
        for (const auto& [rows, dim, ffn] :
             {std::tuple<std::int64_t, std::int64_t, std::int64_t>{1, 7, 5}, {37, 64, 48}, {150, 40, 33}})
          all.push_back({activation, centered, biased, rows, dim, ffn});
  return all;
}

::testing::Message name(const Feed& feed) {
  return ::testing::Message() << (feed.activation == Activation::swiglu ? "swiglu" : "gelu")
                              << (feed.centered ? ", centered" : "") << (feed.biased ? ", biased" : "")
                              << (feed.keep ? ", kept" : "") << ", " << feed.rows << " rows of " << feed.dim;
}

Tensors on(const KernelCheck& check, const Tensors& given) {
  Tensors out;
  for (const Tensor& t : given) out.push_back(t.to(check.device, check.type, false, true).set_requires_grad(true));
  return out;
}

Tensors gradients_of(const Tensors& outputs, const Tensors& inputs, const Tensor& weight) {
  outputs[0].backward(weight);
  Tensors out;
  for (const Tensor& t : inputs) out.push_back(t.grad());
  return out;
}

double relative_error(const Tensor& got, const Tensor& want) {
  const Tensor a = got.detach().to(at::kCPU, at::kDouble), b = want.detach().to(at::kCPU, at::kDouble);
  return ((a - b).norm() / b.norm()).item<double>();
}

template <class Signature, class... Arguments>
auto call(const char* name, Arguments... arguments) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>().call(arguments...);
}

using Quantize = std::tuple<Tensor, Tensor, Tensor>(const Tensor&, Tensor, const std::optional<Tensor>&, std::int64_t, bool,
                                                    bool, bool, bool);
using QuantizeRows = std::tuple<Tensor, Tensor>(const Tensor&, bool);

}  // namespace

void expect_fused_products_follow(const KernelCheck& check) {
  const bool narrow = c10::elementSize(check.type) == 2;
  for (const Feed& feed : feeds()) {
    SCOPED_TRACE(name(feed));
    // On the CPU torch's layer norm sums the gradients of narrow weights in their own type: few rows, then.
    if (narrow && feed.centered && feed.rows > 40 && check.device.is_cpu()) continue;
    const auto all = feed.inputs();
    // One after the other, narrow types round more often than one result's tolerance allows.
    if (!narrow)
      expect_follows([&](const Tensors& t) { return feed.fused(t); }, [&](const Tensors& t) { return feed.reference(t); },
                     all, check);
    const auto bias = [&](const Tensors& t, std::size_t at) { return feed.biased ? t[at] : Tensor(); };
    Tensors first{all[0], all[3], all[1]}, second{all[0], all[5], all[6]};
    if (feed.biased) first.push_back(all[4]);
    if (feed.centered) first.push_back(all[2]);
    expect_follows(
        [&](const Tensors& t) {
          const auto out =
              normed_linear(t[0], {.weight = t[2], .bias = feed.centered ? t.back() : Tensor()}, t[1], {.bias = bias(t, 3)});
          return Tensors{out.out, out.stream};
        },
        [&](const Tensors& t) {
          Tensor out = at::linear(normed(t[0], t[2], feed.centered ? t.back() : Tensor()), t[1]);
          return Tensors{feed.biased ? out + t[3] : out, t[0] * 1};
        },
        first, check);
    second[0] = at::randn({2, feed.rows, all[3].size(0)});
    if (!feed.biased) second.pop_back();
    second.push_back(at::randn({2, feed.rows, feed.dim}));
    expect_follows(
        [&](const Tensors& t) {
          return Tensors{activated_linear(t[0], feed.activation, t[1], {.bias = bias(t, 2), .residual = t.back()})};
        },
        [&](const Tensors& t) {
          const Tensor out = at::linear(activated(t[0], feed.activation), t[1]) + t.back();
          return Tensors{feed.biased ? out + t[2] : out};
        },
        second, check);
  }
  for (const auto& [rows, columns] : {std::pair<std::int64_t, std::int64_t>{1, 1}, {3, 40}, {1000, 33}, {777, 264}}) {
    const Tensor x = at::randn({rows, columns}).to(check.device, check.type);
    const Tensor want = x.to(at::kDouble).sum(0), got = column_sums(x);
    EXPECT_LE((got.to(at::kDouble) - want).abs().max().item<double>(), (check.type == at::kDouble ? 1e-12 : 1e-4) * 30);
  }
}

void expect_fused_products_equal_their_parts(const KernelCheck& check) {
  auto all = feeds();
  for (std::size_t i = 0, count = all.size(); i < count; ++i) {
    all.push_back(all[i]);
    all.back().keep = true;
  }
  for (const Feed& feed : all) {
    SCOPED_TRACE(name(feed));
    const auto given = feed.inputs();
    const Tensors first = on(check, given), second = on(check, given);
    const Tensors together = feed.fused(first), apart = feed.parts(second);
    EXPECT_TRUE(together[0].equal(apart[0]));
    const Tensor weight = at::randn_like(together[0]);
    const auto a = gradients_of(together, first, weight), b = gradients_of(apart, second, weight);
    // The layer norm of the CPU is torch's, whose bits only its own forward knows.
    const bool exact = feed.keep || !(feed.centered && check.device.is_cpu());
    for (std::size_t i = 0; i < a.size(); ++i) {
      const double error = (a[i] - b[i]).abs().max().item<double>();
      const bool summed = i == 4 && feed.activation == Activation::gelu;  // in another order
      if (exact && !summed)
        EXPECT_TRUE(a[i].equal(b[i])) << i << ", by " << error;
      else
        EXPECT_LE(error, tolerance_of(check.type) * (1 + b[i].abs().max().item<double>())) << i;
    }
  }
}

void expect_freezing_changes_nothing_else(const KernelCheck& check) {
  const Feed feed{Activation::gelu, true, true, 20, 32, 48};
  const auto given = feed.inputs();
  const Tensors all = on(check, given);
  const Tensors out = feed.fused(all);
  const Tensor weight = at::randn_like(out[0]);
  const auto want = gradients_of(out, all, weight);
  for (std::size_t trained = 0; trained < given.size(); ++trained) {
    Tensors some = on(check, given);
    for (std::size_t i = 0; i < some.size(); ++i) some[i].set_requires_grad(i == trained);
    const auto got = gradients_of(feed.fused(some), some, weight);
    for (std::size_t i = 0; i < some.size(); ++i) EXPECT_EQ(got[i].defined(), i == trained) << i << " of " << trained;
    const double error = (got[trained] - want[trained]).abs().max().item<double>();
    EXPECT_LE(error, tolerance_of(check.type) * (1 + want[trained].abs().max().item<double>())) << trained;
  }
}

void expect_quantized_near(const KernelCheck& check) {
  for (const auto& [rows, columns] : {std::pair<std::int64_t, std::int64_t>{16, 16}, {48, 400}, {272, 144}})
    for (const bool wide_range : {false, true}) {
      const double largest = wide_range ? 57344 : 448, unit = wide_range ? 0.125 : 0.0625;
      const Tensor x = (at::randn({rows, columns}) * 3).to(check.device, check.type);
      const Tensor exact = x.to(at::kCPU, at::kDouble);
      const Tensor history = at::zeros({4}, at::TensorOptions(check.device).dtype(at::kFloat));
      const auto near = [&](const Tensor& values, const Tensor& inverse) {
        const Tensor got = values.to(at::kCPU).to(at::kDouble) * inverse.to(at::kCPU, at::kDouble);
        const Tensor most = exact.abs().amax() / largest;  // numbers that small have fewer bits
        EXPECT_TRUE(((got - exact).abs() <= unit * exact.abs() + most).all().item<bool>());
      };
      const auto [values, transposed, inverse] =
          call<Quantize>("bonfire::fp8_quantize", x, history, std::optional<Tensor>(), 0, true, wide_range, true, true);
      near(values, inverse);
      EXPECT_TRUE(transposed.to(at::kFloat).equal(values.to(at::kFloat).t()));
      EXPECT_FLOAT_EQ(inverse.item<float>(), static_cast<float>(exact.abs().max().item<double>() / largest));
      EXPECT_FLOAT_EQ(history[0].item<float>(), exact.abs().max().item<float>());
      // The next but one looks at the first, by the device's count of calls as by the host's; what is too large for it stops
      // at the largest number.
      call<Quantize>("bonfire::fp8_quantize", x, history, std::optional<Tensor>(), 1, true, wide_range, true, false);
      const std::optional<Tensor> one_later = at::ones({1}, at::TensorOptions(check.device).dtype(at::kLong));
      const auto [late, none, same] =
          call<Quantize>("bonfire::fp8_quantize", x * 2, history, one_later, 1, false, wide_range, true, false);
      EXPECT_EQ(none.numel(), 0);
      EXPECT_FLOAT_EQ(same.item<float>(), inverse.item<float>());
      EXPECT_EQ(late.to(at::kFloat).abs().max().item<float>(), static_cast<float>(largest));
      EXPECT_FLOAT_EQ(history[2].item<float>(), 2 * exact.abs().max().item<float>());

      const auto [by_row, inverses] = call<QuantizeRows>("bonfire::fp8_quantize_rows", x, wide_range);
      near(by_row, inverses.unsqueeze(1));
      EXPECT_TRUE(at::allclose(inverses.to(at::kCPU, at::kDouble) * largest, exact.abs().amax(1), 1e-6));
    }
}

void expect_fp8_products_near(const KernelCheck& check) {
  for (const auto scaling : {Fp8Scaling::current, Fp8Scaling::delayed})
    for (const auto scales : {Fp8Scales::tensor, Fp8Scales::row})
      for (const bool exact : {true, false}) {
        const auto fp8 = std::make_shared<Fp8Product>(Fp8Recipe{scaling, scales});
        const auto whole = [&](at::IntArrayRef sizes) {  // small powers of two: eight bits hold them, and fp32 their sums
          return exact ? at::pow(2.0, at::randint(-1, 2, sizes).to(at::kDouble)) * (at::randint(0, 2, sizes) * 2 - 1)
                       : at::randn(sizes, at::kDouble);
        };
        const std::int64_t rows = 64, in = 96, out = 48;
        const Tensors given{whole({2, rows / 2, in}), whole({out, in}), whole({out}), whole({2, rows / 2, out})};
        const Tensor weight = whole({2, rows / 2, out});
        Tensors reference;
        for (const Tensor& t : given) reference.push_back(t.to(check.type).to(at::kDouble).set_requires_grad(true));
        const Tensor want = at::linear(reference[0], reference[1], reference[2]) + reference[3];
        const auto expected = gradients_of({want}, reference, weight.to(check.type).to(at::kDouble));
        // Several times, so that there is a history to go by.
        for (int repeat = 0; repeat < 3; ++repeat) {
          const Tensors t = on(check, given);
          const Tensor got = bonfire::linear(t[0], t[1], {.bias = t[2], .residual = t[3], .fp8 = fp8});
          const auto gradients = gradients_of({got}, t, weight.to(check.device, check.type));
          const double most = exact ? 0.01 : 0.08;  // exact: what bf16 rounds
          EXPECT_LE(relative_error(got, want), most);
          for (std::size_t i = 0; i < t.size(); ++i) EXPECT_LE(relative_error(gradients[i], expected[i]), most) << i;
        }
        // And through the fused layers, where the norm is kept in eight bits.
        const Feed feed{Activation::swiglu, false, false, 32, 64, 96, exact};
        const auto inputs = feed.inputs();
        const Tensors t = on(check, inputs);
        Tensors wide;
        for (const Tensor& x : t) wide.push_back(x.detach().to(at::kCPU, at::kDouble).set_requires_grad(true));
        const auto up = std::make_shared<Fp8Product>(Fp8Recipe{scaling, scales}),
                   down = std::make_shared<Fp8Product>(Fp8Recipe{scaling, scales});
        const auto [hidden, stream] = normed_linear(t[0], {.weight = t[1]}, t[3], {.fp8 = up, .keep = feed.keep});
        const Tensor got =
            activated_linear(hidden, feed.activation, t[5], {.residual = stream, .fp8 = down, .keep = feed.keep}) +
            feed.unused(t);
        const Tensors true_out = feed.reference(wide);
        const Tensor d = at::randn_like(true_out[0]).to(check.type).to(at::kDouble);
        const auto a = gradients_of({got}, t, d.to(check.device, check.type)), b = gradients_of(true_out, wide, d);
        EXPECT_LE(relative_error(got, true_out[0]), 0.08);
        constexpr double chained = 3.0 / 16;  // a gradient that is rounded to three bits twice on its way
        for (const std::size_t i : {0, 1, 3, 5}) EXPECT_LE(relative_error(a[i], b[i]), chained) << i;
      }
}

}  // namespace bonfire::testing
