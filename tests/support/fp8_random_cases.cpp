#include "tests/support/fp8_random_cases.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

#include "bonfire/kernels/fp8.h"
#include "bonfire/kernels/quantized_activation.h"
#include "bonfire/kernels/scaled_weight.h"
#include "tests/support/feed.h"

namespace bonfire::testing {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

// The formats, from their definitions.

struct Format {
  int mantissa_bits, bias;
  double largest;
  std::vector<double> numbers{};  // that are finite and not negative, by their bits

  Format(int mantissa_bits, int bias, double largest) : mantissa_bits(mantissa_bits), bias(bias), largest(largest) {
    for (int bits = 0; decoded(bits) <= largest; ++bits) numbers.push_back(decoded(bits));
  }
  double decoded(int bits) const {
    const int exponent = bits >> mantissa_bits, mantissa = bits & ((1 << mantissa_bits) - 1);
    const double fraction = std::ldexp(mantissa, -mantissa_bits);
    return exponent == 0 ? std::ldexp(fraction, 1 - bias) : std::ldexp(1 + fraction, exponent - bias);
  }
  // What a byte is; not a number for the infinities of e5m2 too, which no operator writes.
  double value(std::uint8_t byte) const {
    const auto bits = static_cast<std::size_t>(byte & 0x7f);
    const double magnitude = bits < numbers.size() ? numbers[bits] : std::nan("");
    return byte & 0x80 ? -magnitude : magnitude;
  }
  // Whether x, which is no more precise than fp32 makes it, may be rounded to `got`: to nearest, halves to even.
  bool rounds_to(double x, double got) const {
    if (!std::isfinite(x)) return std::isnan(got);
    if (std::isnan(got)) return false;
    const double magnitude = std::min(std::abs(x), largest);
    const auto above = std::lower_bound(numbers.begin(), numbers.end(), magnitude);
    if (above == numbers.begin()) return got == 0;
    const double high = *above, low = *(above - 1), middle = (low + high) / 2;
    if (got != 0 && std::signbit(got) != std::signbit(x)) return false;
    // A half that fp32's rounding moved, either way.
    if (std::abs(magnitude - middle) <= 0x1p-22 * middle) return std::abs(got) == low || std::abs(got) == high;
    return std::abs(got) == (magnitude < middle ? low : high);
  }
};

const Format& format(bool wide_range) {
  static const Format e4m3(3, 7, 448), e5m2(2, 15, 57344);
  return wide_range ? e5m2 : e4m3;
}

// The rules.

double magnitude_of(const Tensor& x) {
  double largest = 0;
  const auto* data = x.const_data_ptr<double>();
  for (std::int64_t i = 0; i < x.numel(); ++i)
    if (std::isfinite(data[i])) largest = std::max(largest, std::abs(data[i]));
  return largest;
}

double scale_of(double magnitude, bool wide_range) {
  if (magnitude == 0) return 1;
  return std::min(static_cast<double>(static_cast<float>(format(wide_range).largest / magnitude)), 0x1p126);
}

Tensor on_host(const Tensor& x) { return x.detach().to(at::kCPU, at::kDouble).contiguous(); }

// Rows of x, the elements that `values` stands for, against rows of scales: one for all or one for each.
void expect_rounded(const Tensor& values, const Tensor& x, const std::vector<double>& scales, bool wide_range) {
  const Tensor bytes = values.view(at::kByte).to(at::kCPU).contiguous(), exact = on_host(x);
  ASSERT_EQ(bytes.sizes(), exact.sizes());
  const auto* got = bytes.const_data_ptr<std::uint8_t>();
  const auto* want = exact.const_data_ptr<double>();
  const std::int64_t each = exact.numel() / static_cast<std::int64_t>(scales.size());
  int wrong = 0;
  for (std::int64_t i = 0; i < exact.numel() && wrong < 5; ++i) {
    const double scale = scales[static_cast<std::size_t>(i / each)], value = format(wide_range).value(got[i]);
    // Too large for fp32 is not infinite: it stops at the largest number as well.
    const double scaled = std::isfinite(want[i]) ? std::clamp(want[i] * scale, -1e300, 1e300) : infinity;
    if (format(wide_range).rounds_to(scaled, value)) continue;
    ++wrong;
    ADD_FAILURE() << "element " << i << ", " << want[i] << " times " << scale << " is " << scaled << ", not " << value;
  }
}

void expect_inverse(const Tensor& inverse, const std::vector<double>& scales) {
  const Tensor got = on_host(inverse);
  ASSERT_EQ(got.numel(), static_cast<std::int64_t>(scales.size()));
  for (std::size_t i = 0; i < scales.size(); ++i) {
    const double value = got[static_cast<std::int64_t>(i)].item<double>();
    EXPECT_LE(std::abs(value * scales[i] - 1), 0x1p-22) << value << " for a scale of " << scales[i];
  }
}

// What is drawn.

struct Draw {
  std::mt19937_64 engine;
  explicit Draw(std::uint64_t seed) : engine(seed) {}

  std::int64_t below(std::int64_t n) { return static_cast<std::int64_t>(engine() % static_cast<std::uint64_t>(n)); }
  bool one_in(std::int64_t n) { return below(n) == 0; }
  double between(double low, double high) { return std::uniform_real_distribution<double>(low, high)(engine); }
  Tensor normal(at::IntArrayRef sizes) {
    Tensor x = at::empty(sizes, at::kDouble);
    std::normal_distribution<double> distribution;
    for (std::int64_t i = 0; i < x.numel(); ++i) x.data_ptr<double>()[i] = distribution(engine);
    return x;
  }
  double special() {
    constexpr double all[] = {0, -0.0, infinity, -infinity, 1e-45, -3e-39, 1.2e-38, 6e-8, 65504, 3e38, -3e38};
    const auto at = below(std::size(all) + 1);
    return at == static_cast<std::int64_t>(std::size(all)) ? std::nan("") : all[at];
  }
  // Of any kind, as the type holds it.
  Tensor tensor(at::IntArrayRef sizes, const KernelCheck& check, at::ScalarType type) {
    Tensor x = normal(sizes) * std::pow(10, between(-41, 37));
    if (one_in(4)) x = normal(sizes) * std::pow(10, between(-3, 3));
    if (one_in(3)) {
      for (std::int64_t count = 1 + below(20); count > 0; --count) x.view({-1})[below(x.numel())] = special();
    } else if (one_in(6)) {
      x.fill_(special());
    }
    return x.to(type).to(check.device);
  }
};

using Quantize = std::tuple<Tensor, Tensor, Tensor>(const Tensor&, Tensor, const std::optional<Tensor>&, std::int64_t, bool,
                                                    bool, bool, bool);
using QuantizeRows = std::tuple<Tensor, Tensor>(const Tensor&, bool);

// The magnitudes of calls, as a delayed scale looks at them: all but the one that comes and the one that came so long ago
// that its place is the next.
struct Calls {
  std::size_t length;
  std::vector<double> magnitudes{};
  double largest() const {
    double found = 0;
    for (std::size_t back = 1; back + 2 <= length && back <= magnitudes.size(); ++back)
      found = std::max(found, magnitudes[magnitudes.size() - back]);
    return found;
  }
};

void expect_random_calls(Draw& draw, const KernelCheck& check) {
  const bool wide_range = draw.one_in(2);
  Calls calls{.length = draw.one_in(2) ? std::size_t{16} : std::size_t{4}};
  const auto numbers = at::TensorOptions(check.device).dtype(at::kFloat);
  const Tensor history = at::zeros({static_cast<std::int64_t>(calls.length)}, numbers);
  for (std::int64_t position = 0; position < 12; ++position) {
    SCOPED_TRACE(::testing::Message() << "call " << position << (wide_range ? " of e5m2" : " of e4m3"));
    const std::int64_t rows = 16 * (1 + draw.below(9)), columns = 16 * (1 + draw.below(9));
    const Tensor x = draw.tensor({rows, columns}, check, check.type);
    const bool measure = position == 0 || draw.one_in(4), values = draw.one_in(2);
    const std::int64_t shift = draw.one_in(2) ? draw.below(position + 1) : 0;
    const std::optional<Tensor> later =
        shift ? std::optional<Tensor>(at::full({1}, shift, numbers.dtype(at::kLong))) : std::nullopt;
    const double own = magnitude_of(on_host(x)), scale = scale_of(measure ? own : calls.largest(), wide_range);
    const auto [straight, turned, inverse] = call<Quantize>("bonfire::fp8_quantize", x, history, later, position - shift,
                                                            measure, wide_range, values, !values || draw.one_in(2));
    expect_inverse(inverse, {scale});
    if (values) expect_rounded(straight, x, {scale}, wide_range);
    if (turned.numel() > 0) expect_rounded(turned.view(at::kByte).t(), x, {scale}, wide_range);
    EXPECT_EQ(history[position % history.numel()].item<double>(), own);
    calls.magnitudes.push_back(own);
  }
}

void expect_random_rows(Draw& draw, const KernelCheck& check) {
  const bool wide_range = draw.one_in(2);
  const Tensor x = draw.tensor({16 * (1 + draw.below(6)), 16 * (1 + draw.below(9))}, check, check.type);
  const auto [values, inverse] = call<QuantizeRows>("bonfire::fp8_quantize_rows", x, wide_range);
  std::vector<double> scales;
  for (std::int64_t row = 0; row < x.size(0); ++row) scales.push_back(scale_of(magnitude_of(on_host(x[row])), wide_range));
  expect_inverse(inverse, scales);
  expect_rounded(values, x, scales, wide_range);
}

void expect_random_weight(Draw& draw, const KernelCheck& check) {
  const std::int64_t rows = 1 + draw.below(20), columns = 16 * (1 + draw.below(9)), scales = draw.one_in(2) ? 1 : rows;
  const std::int64_t each = rows * columns / scales;
  const Tensor x = draw.tensor({rows * columns}, check, at::kFloat);
  const Tensor magnitudes = at::zeros({scales}, x.options());
  const Tensor eight = at::empty(x.sizes(), x.options().dtype(at::kFloat8_e4m3fn));
  note_magnitudes(magnitudes, {.elements = x, .each = each});
  round_scaled(eight, {.elements = x, .each = each}, magnitudes);
  std::vector<double> wanted;
  for (std::int64_t at = 0; at < scales; ++at) {
    const double own = magnitude_of(on_host(x.narrow(0, at * each, each)));
    EXPECT_EQ(magnitudes[at].item<double>(), own);
    // Zeros have the largest scale there is: gradients are divided by the scales of rows, and the least decides.
    wanted.push_back(own == 0 ? 0x1p126 : scale_of(own, false));
  }
  expect_inverse(inverse_scales(magnitudes), wanted);
  expect_rounded(eight, x, wanted, false);
}

// An activation that is rounded where it is made is what rounding it afterwards gives, and notes what that notes.
void expect_random_activation(Draw& draw, const KernelCheck& check) {
  const std::int64_t rows = 16 * (1 + draw.below(9)), columns = 16 * (1 + draw.below(9));
  const Tensor wide = draw.tensor({rows, 2 * columns}, check, check.type);
  const Tensor d_out = draw.tensor({rows, columns}, check, check.type);
  const Tensor activated = activate(Activation::swiglu, wide);
  const Tensor d_wide = activate_backward(Activation::swiglu, d_out, wide).wide;
  const auto same = [](const Tensor& a, const Tensor& b, bool wide_range) {
    const Tensor first = a.view(at::kByte).to(at::kCPU).contiguous(), second = b.view(at::kByte).to(at::kCPU).contiguous();
    ASSERT_EQ(first.sizes(), second.sizes());
    for (std::int64_t i = 0; i < first.numel(); ++i) {
      const double x = format(wide_range).value(first.const_data_ptr<std::uint8_t>()[i]),
                   y = format(wide_range).value(second.const_data_ptr<std::uint8_t>()[i]);
      ASSERT_TRUE(x == y || (std::isnan(x) && std::isnan(y))) << "element " << i << ": " << x << " and " << y;
    }
  };
  // Magnitudes of the calls before, as those have noted them.
  const Tensor past = at::zeros({16}, at::TensorOptions(check.device).dtype(at::kFloat));
  past.narrow(0, 2, 3).fill_(draw.one_in(3) ? 0 : std::pow(10, draw.between(-44, 38)));
  const Tensor first[2] = {past.clone(), past.clone()}, second[2] = {past.clone(), past.clone()};
  const auto [values, none, inverse] =
      call<Quantize>("bonfire::fp8_quantize", activated, first[0], std::optional<Tensor>(), 7, false, false, true, false);
  const auto at_once = quantized_swiglu(wide, {.history = first[1], .position = 7}, false);
  same(at_once.values, values, false);
  EXPECT_TRUE(at_once.inverse.equal(inverse));
  EXPECT_TRUE(first[0].equal(first[1])) << first[0] << first[1];
  const auto [d_values, d_turned, d_inverse] =
      call<Quantize>("bonfire::fp8_quantize", d_wide, second[0], std::optional<Tensor>(), 7, false, true, true, true);
  const auto d = quantized_swiglu_backward(d_out, wide, {.gradient = {.history = second[1], .position = 7}});
  same(d.d_wide.values, d_values, true);
  same(d.d_wide.transposed, d_turned, true);
  EXPECT_TRUE(d.d_wide.inverse.equal(d_inverse));
  EXPECT_TRUE(second[0].equal(second[1])) << second[0] << second[1];
}

}  // namespace

void expect_random_quantized(const KernelCheck& check, std::uint64_t seed) {
  SCOPED_TRACE(::testing::Message() << "seed " << seed << ", " << c10::toString(check.type));
  Draw draw(seed);
  expect_random_calls(draw, check);
  expect_random_rows(draw, check);
  expect_random_weight(draw, check);
  expect_random_activation(draw, check);
}

void expect_random_fp8_steps(const KernelCheck& check, std::uint64_t seed) {
  Draw draw(seed);
  const Fp8Recipe recipe{.scaling = draw.one_in(2) ? Fp8Scaling::delayed : Fp8Scaling::current,
                         .scales = draw.one_in(2) ? Fp8Scales::tensor : Fp8Scales::row};
  SCOPED_TRACE(::testing::Message() << "seed " << seed << ", " << c10::toString(check.type)
                                    << (recipe.scaling == Fp8Scaling::delayed ? ", delayed" : ", current")
                                    << (recipe.scales == Fp8Scales::tensor ? ", by tensor" : ", by row"));
  const auto fp8 = std::make_shared<Fp8Product>(recipe);
  const std::int64_t rows = 16 * (1 + draw.below(4)), in = 16 * (1 + draw.below(4)), out = 16 * (1 + draw.below(4));
  const double size = std::pow(10, draw.between(-2, 2));
  const Tensor weight = draw.normal({out, in}) * 0.1;
  enum Kind { numbers, tiny, zeros, none_in_x, none_in_gradient, kinds };
  int since_numbers = 0;
  for (int step = 0; step < 10; ++step, ++since_numbers) {
    // A delayed scale has to have something to go by: the first step, and later one of the last seven.
    const bool plain = step == 0 || since_numbers > 5 || draw.one_in(3);
    const auto kind = plain ? numbers : static_cast<Kind>(draw.below(kinds));
    if (kind == numbers) since_numbers = 0;
    SCOPED_TRACE(::testing::Message() << "step " << step << ", kind " << kind);
    const double factor = kind == tiny ? std::pow(10, draw.between(-45, -30)) : kind == zeros ? 0 : 1;
    Tensor x = draw.normal({rows, in}) * size * factor, d = draw.normal({rows, out}) * 0.01 * size * factor;
    const double none = draw.one_in(3) ? std::nan("") : draw.one_in(2) ? infinity : -infinity;
    if (kind == none_in_x) x.view({-1})[draw.below(x.numel())] = none;
    if (kind == none_in_gradient) d.view({-1})[draw.below(d.numel())] = none;
    const Tensors given = on(check, {x, weight});
    const Tensor got = bonfire::linear(given[0], given[1], {.fp8 = fp8});
    const auto gradients = gradients_of({got}, given, d.to(check.device, check.type));
    const auto finite = [](const Tensor& t) { return at::isfinite(t).all().item<bool>(); };
    EXPECT_EQ(finite(got), kind != none_in_x);
    EXPECT_EQ(finite(gradients[0]), kind != none_in_gradient);
    EXPECT_EQ(finite(gradients[1]), kind != none_in_x && kind != none_in_gradient);
    if (kind != numbers) continue;
    Tensors wide;
    for (const Tensor& t : given) wide.push_back(t.detach().to(at::kCPU, at::kDouble).set_requires_grad(true));
    const Tensor want = at::linear(wide[0], wide[1]);
    const auto expected = gradients_of({want}, wide, d.to(check.type).to(at::kDouble));
    EXPECT_LE(relative_error(got, want), 0.08);
    for (std::size_t i = 0; i < 2; ++i) EXPECT_LE(relative_error(gradients[i], expected[i]), 0.1) << i;
  }
}

}  // namespace bonfire::testing
