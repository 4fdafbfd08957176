#include "tests/support/fp8_cases.h"

#include <gtest/gtest.h>

#include "bonfire/kernels/fp8.h"
#include "bonfire/kernels/quantized_activation.h"
#include "tests/support/feed.h"

namespace bonfire::testing {
namespace {

using Quantize = std::tuple<Tensor, Tensor, Tensor>(const Tensor&, Tensor, const std::optional<Tensor>&, std::int64_t, bool,
                                                    bool, bool, bool);
using QuantizeRows = std::tuple<Tensor, Tensor>(const Tensor&, bool);

}  // namespace

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

void expect_scaled_weights_near(const KernelCheck& check) {
  for (const auto& [rows, columns] : {std::pair<std::int64_t, std::int64_t>{16, 16}, {48, 400}, {272, 1168}})
    for (const std::int64_t scales : {std::int64_t{1}, rows}) {
      const Tensor weight = (at::randn({rows, columns}) * at::rand({rows, 1})).to(check.device);
      const std::int64_t elements = rows * columns, each = elements / scales;
      const Tensor flat = weight.view({-1});
      const auto zeros = [&] { return at::zeros({scales}, weight.options()); };
      const auto empty = [&] { return at::empty({elements}, weight.options().dtype(at::kFloat8_e4m3fn)); };
      const Tensor magnitudes = zeros(), whole = empty();
      note_magnitudes(magnitudes, {.elements = flat, .each = each});
      EXPECT_TRUE(magnitudes.equal(weight.view({scales, each}).abs().amax(1)));
      round_scaled(whole, {.elements = flat, .each = each}, magnitudes);
      const Tensor inverse = inverse_scales(magnitudes).view({-1, 1}), got = whole.to(at::kFloat).view({scales, each});
      const Tensor exact = weight.view({scales, each});
      EXPECT_TRUE(((got * inverse - exact).abs() <= exact.abs() / 16 + inverse / 512).all().item<bool>());
      EXPECT_TRUE((got.abs().amax(1) == 448).all().item<bool>());

      // In parts that begin and end anywhere.
      const Tensor found = zeros(), parts = empty();
      const std::int64_t ends[] = {0, 64, 64 + (elements / 3) / 16 * 16, elements};
      for (int at = 0; at < 3; ++at)
        note_magnitudes(found, {flat.narrow(0, ends[at], ends[at + 1] - ends[at]), ends[at], each});
      EXPECT_TRUE(found.equal(magnitudes));
      for (int at = 0; at < 3; ++at)
        round_scaled(parts.narrow(0, ends[at], ends[at + 1] - ends[at]),
                     {flat.narrow(0, ends[at], ends[at + 1] - ends[at]), ends[at], each}, magnitudes);
      EXPECT_TRUE(parts.view(at::kByte).equal(whole.view(at::kByte)));

      const Tensor square = whole.view({rows, columns});
      EXPECT_TRUE(transposed_weight(square).view(at::kByte).equal(square.view(at::kByte).t()));
      EXPECT_TRUE(
          at::allclose(unscaled_weight(square, inverse_scales(magnitudes), at::kFloat).view({scales, each}), got * inverse));
    }
}

namespace {

struct FloatSink final : GradientSink {
  explicit FloatSink(const Tensor& like) : sum(at::zeros_like(like, like.options().dtype(at::kFloat))) {}
  Tensor buffer(bool& fresh) override {
    fresh = false;
    return sum;
  }
  void arrived() override {}
  Tensor sum;
};

struct ScaledCase {
  Fp8Recipe recipe{};
  std::int64_t rows = 64;      // multiples of 16 for fp8
  bool rows_of_zeros = false;  // among small ones, as adapters and new heads have them, with small gradients
};

// A product whose weight comes in eight bits is that of what the weight stands for.
void expect_scaled_products_near(const KernelCheck& check, const ScaledCase& given_case) {
  const auto& [recipe, rows, rows_of_zeros] = given_case;
  const std::int64_t in = 96, out = 48;
  const auto fp8 = std::make_shared<Fp8Product>(recipe);
  const Tensor masters = at::randn({out, in}).to(check.device);
  if (rows_of_zeros) masters.mul_(0.01).slice(0, 0, out, 4).zero_();
  const std::int64_t scales = recipe.scales == Fp8Scales::row ? out : 1;
  const Tensor magnitudes = at::zeros({scales}, masters.options());
  note_magnitudes(magnitudes, {.elements = masters.view({-1}), .each = out * in / scales});
  const Tensor weight = at::empty({out, in}, masters.options().dtype(at::kFloat8_e4m3fn));
  round_scaled(weight.view({-1}), {.elements = masters.view({-1}), .each = out * in / scales}, magnitudes);
  fp8->weight_scales() = std::make_shared<WeightScales>(WeightScales{inverse_scales(magnitudes)});
  const Tensor read = weight.detach().set_requires_grad(true);
  const auto sink = std::make_shared<FloatSink>(weight);
  const Tensors given = on(check, {at::randn({rows, in}), at::randn({rows, out})});
  const Tensor got = bonfire::linear(given[0], read, {.residual = given[1], .weight_sink = sink, .fp8 = fp8});

  Tensors wide;
  for (const Tensor& t : given) wide.push_back(t.detach().to(at::kCPU, at::kDouble).set_requires_grad(true));
  const Tensor stands_for =
      unscaled_weight(weight, inverse_scales(magnitudes), at::kFloat).to(at::kCPU, at::kDouble).set_requires_grad(true);
  const Tensor want = at::linear(wide[0], stands_for) + wide[1];
  EXPECT_LE(relative_error(got, want), 0.05);
  const Tensor d = at::randn_like(want).mul_(rows_of_zeros ? 1e-3 : 1).to(check.type).to(at::kDouble);
  const auto a = gradients_of({got}, given, d.to(check.device, check.type));
  const auto b = gradients_of({want}, {wide[0], wide[1], stands_for}, d);
  for (std::size_t i = 0; i < 2; ++i) EXPECT_LE(relative_error(a[i], b[i]), 0.08) << i;
  EXPECT_LE(relative_error(sink->sum, b[2]), 0.08);
}

}  // namespace

void expect_activations_rounded_at_once(const KernelCheck& check) {
  const auto same = [](const Tensor& a, const Tensor& b) { EXPECT_TRUE(a.view(at::kByte).equal(b.view(at::kByte))); };
  for (const auto& [rows, columns] : {std::pair<std::int64_t, std::int64_t>{16, 16}, {48, 400}, {272, 144}}) {
    const auto make = [&](std::int64_t width) { return at::randn({rows, width}).to(check.device, check.type); };
    const auto zeros = [&] { return at::zeros({16}, at::TensorOptions(check.device).dtype(at::kFloat)); };
    const Tensor wide = make(2 * columns), d_out = make(columns);
    const Tensor activated = activate(Activation::swiglu, wide);
    const Tensor d_wide = activate_backward(Activation::swiglu, d_out, wide).wide;
    const Tensor one = at::ones({1}, at::TensorOptions(check.device).dtype(at::kLong));
    // Beside each other: two histories that are treated alike. What comes is larger than what was.
    const Tensor first[2] = {zeros(), zeros()}, second[2] = {zeros(), zeros()};
    for (const auto& history : first) history[3] = 0.6 * activated.abs().amax().to(at::kFloat);
    for (const auto& history : second) history[3] = 0.6 * d_wide.abs().amax().to(at::kFloat);
    for (std::int64_t position = 5; position < 8; ++position) {
      const bool turned = position % 2;
      const auto [values, transposed, inverse] = call<Quantize>(
          "bonfire::fp8_quantize", activated, first[0], std::optional<Tensor>(), position, false, false, true, turned);
      const auto at_once = quantized_swiglu(wide, {first[1], position - 1, one}, turned);
      same(at_once.values, values);
      if (turned) same(at_once.transposed, transposed);
      EXPECT_TRUE(at_once.inverse.equal(inverse));
      EXPECT_TRUE(first[0].equal(first[1]));
    }
    for (std::int64_t position = 8; position < 10; ++position) {
      const bool again = position % 2;
      const auto [values, transposed, inverse] = call<Quantize>("bonfire::fp8_quantize", d_wide, second[0],
                                                                std::optional<Tensor>(), position, false, true, true, true);
      const auto d = quantized_swiglu_backward(d_out, wide,
                                               {.activated = again ? KnownScale{first[1], position - 1, one} : KnownScale(),
                                                .gradient = {second[1], position - 1, one}});
      same(d.d_wide.values, values);
      same(d.d_wide.transposed, transposed);
      EXPECT_TRUE(d.d_wide.inverse.equal(inverse));
      EXPECT_TRUE(second[0].equal(second[1]));
      EXPECT_EQ(d.activated.transposed.defined(), again);
      if (!again) continue;
      const auto [none, turned, scale] = call<Quantize>("bonfire::fp8_quantize", activated, first[0],
                                                        std::optional<Tensor>(), position, false, false, false, true);
      same(d.activated.transposed, turned);
      EXPECT_TRUE(d.activated.inverse.equal(scale));
      EXPECT_TRUE(first[0].equal(first[1]));
    }
  }
}

void expect_fp8_products_near(const KernelCheck& check) {
  for (const auto scaling : {Fp8Scaling::current, Fp8Scaling::delayed})
    for (const auto scales : {Fp8Scales::tensor, Fp8Scales::row})
      for (const std::int64_t rows : {64, 40})
        for (const bool zeros : {false, true}) expect_scaled_products_near(check, {{scaling, scales}, rows, zeros});
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
        Tensors wide;
        for (const Tensor& x : on(check, inputs))
          wide.push_back(x.detach().to(at::kCPU, at::kDouble).set_requires_grad(true));
        const auto up = std::make_shared<Fp8Product>(Fp8Recipe{scaling, scales}),
                   down = std::make_shared<Fp8Product>(Fp8Recipe{scaling, scales});
        const Tensors true_out = feed.reference(wide);
        const Tensor d = at::randn_like(true_out[0]).to(check.type).to(at::kDouble);
        const auto b = gradients_of(true_out, wide, d);
        // The second time scales are known, and the activation is rounded where it is made.
        for (int repeat = 0; repeat < 3; ++repeat) {
          const Tensors t = on(check, inputs);
          auto parts = feed.all(t);
          parts.up_options.fp8 = up;
          parts.down_options.fp8 = down;
          const Tensor got = feed_forward(t[0], parts).out + feed.unused(t);
          const auto a = gradients_of({got}, t, d.to(check.device, check.type));
          EXPECT_LE(relative_error(got, true_out[0]), 0.08);
          constexpr double chained = 3.0 / 16;  // a gradient that is rounded to three bits twice on its way
          for (const std::size_t i : {0, 1, 3, 5}) EXPECT_LE(relative_error(a[i], b[i]), chained) << i;
        }
      }
}

}  // namespace bonfire::testing
