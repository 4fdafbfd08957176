#include <cmath>

#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include "bonfire/comm/device.h"
#include "bonfire/kernels/activated_product.h"
#include "bonfire/kernels/product.h"
#include "bonfire/kernels/qkv.h"
#include "tests/support/feed.h"
#include "tests/support/fp8_cases.h"
#include "tests/support/fp8_random_cases.h"
#include "tests/support/fused_cases.h"
#include "tests/support/gpu_ranks.h"

namespace bonfire::fused_test {
namespace {

using at::Tensor;

const c10::Device gpu(c10::kCUDA, 0);

class GpuFusedProducts : public ::testing::TestWithParam<at::ScalarType> {
 protected:
  void SetUp() override {
    BONFIRE_SKIP_WITHOUT_GPU();
    at::manual_seed(5);
  }
  static bonfire::testing::KernelCheck check() { return {.type = GetParam(), .device = gpu}; }
};
INSTANTIATE_TEST_SUITE_P(Types, GpuFusedProducts, ::testing::Values(at::kDouble, at::kFloat, at::kBFloat16, at::kHalf),
                         [](const auto& info) { return std::string(c10::toString(info.param)); });

TEST_P(GpuFusedProducts, FollowDoublePrecision) { bonfire::testing::expect_fused_products_follow(check()); }
TEST_P(GpuFusedProducts, EqualTheirParts) { bonfire::testing::expect_fused_products_equal_their_parts(check()); }
TEST_P(GpuFusedProducts, BiasGradientsFollow) { bonfire::testing::expect_bias_gradients_follow(check()); }
TEST_P(GpuFusedProducts, FreezingChangesNothingElse) { bonfire::testing::expect_freezing_changes_nothing_else(check()); }

// Queries and keys turned where they lie are those that are turned on the way elsewhere.
TEST_P(GpuFusedProducts, QkvInPlace) {
  const auto options = at::TensorOptions(gpu).dtype(GetParam());
  const auto wide = GetParam() == at::kDouble ? at::kDouble : at::kFloat;
  for (const std::int64_t size : {6, 64}) {
    QkvLayout layout{.heads = 4, .kv_heads = 2};
    layout.rotary = rotary_table({.positions = 11, .head_dim = size}, options.dtype(wide));
    const Tensor qkv = at::randn({2, 9, 8 * size}, options), copy = qkv.clone();
    const auto [q, k, v] = split_qkv(qkv, layout);
    EXPECT_TRUE(qkv.equal(copy));
    layout.in_place = true;
    const auto [q2, k2, v2] = split_qkv(copy, layout);
    EXPECT_TRUE(q.equal(q2) && k.equal(k2) && v.equal(v2)) << size;
    EXPECT_EQ(v2.storage().data(), copy.storage().data());
  }
}

// The way that is found to be the fastest gives the bits of the one that is taken where nothing is tried: in place.
TEST_P(GpuFusedProducts, TryingProductsChangesNoBits) {
  const auto options = at::TensorOptions(gpu).dtype(GetParam());
  for (const auto& [rows, columns, depth] :
       {std::tuple<std::int64_t, std::int64_t, std::int64_t>{1024, 1536, 1024}, {4096, 768, 768}, {768, 768, 8192}}) {
    const Tensor a = at::randn({rows, depth}, options), b = at::randn({depth, columns}, options);
    Tensor untried = at::zeros({rows, columns}, options);
    product_into(untried, a, b, Writing::add);
    const Tensor tried = product(a, b), again = product(a, b);
    EXPECT_TRUE(tried.equal(untried)) << rows << " x " << columns << " x " << depth;
    EXPECT_TRUE(tried.equal(again));
  }
}

// Nor do operands that tell ways apart too little, as those of adapters and heads that begin with zeros: what is found with
// them holds for all that come later.
TEST_P(GpuFusedProducts, TryingProductsOfZerosChangesNoBits) {
  const auto options = at::TensorOptions(gpu).dtype(GetParam());
  // Of shapes that no other test has tried.
  for (const auto& [rows, columns, depth] :
       {std::tuple<std::int64_t, std::int64_t, std::int64_t>{1152, 1664, 1088}, {4224, 640, 832}, {640, 896, 8320}}) {
    const Tensor a = at::randn({rows, depth}, options), b = at::randn({depth, columns}, options);
    const Tensor nothing = product(a, at::zeros_like(b));
    EXPECT_TRUE((nothing == 0).all().item<bool>());
    Tensor untried = at::zeros({rows, columns}, options);
    product_into(untried, a, b, Writing::add);
    EXPECT_TRUE(product(a, b).equal(untried)) << rows << " x " << columns << " x " << depth;
  }
}

// Tiles that stick out on every side, sums of one step and of many, on GPUs whose products take activations.
struct ActivatedShape {
  Activation activation;
  std::int64_t rows, columns, inner;
  bool biased = false;
};
class GpuActivatedProducts : public ::testing::TestWithParam<ActivatedShape> {
 protected:
  void SetUp() override {
    BONFIRE_SKIP_WITHOUT_GPU();
    if (gpu_info(0).major != 9) GTEST_SKIP() << "they are Hopper's";
    at::manual_seed(5);
  }
};
INSTANTIATE_TEST_SUITE_P(Shapes, GpuActivatedProducts,
                         ::testing::Values(ActivatedShape{Activation::swiglu, 5000, 1088, 200},
                                           ActivatedShape{Activation::swiglu, 16384, 192, 8},
                                           ActivatedShape{Activation::swiglu, 4100, 704, 1600},
                                           ActivatedShape{Activation::gelu, 8333, 1344, 136, true},
                                           ActivatedShape{Activation::gelu, 20001, 704, 72},
                                           ActivatedShape{Activation::gelu, 20001, 1088, 64, true},
                                           ActivatedShape{Activation::gelu, 4100, 3072, 1600, true}));

// Of elements that are each a sum of `inner` rounded products, rounded once.
void expect_near(const Tensor& got, const Tensor& expected, const char* what) {
  const Tensor off = (got.to(at::kDouble) - expected).abs();
  const Tensor allowed = expected.abs() * 0x1p-7 + expected.abs().mean() * 0x1p-7;
  EXPECT_LE((off / allowed).max().item<double>(), 1) << what;
}

TEST_P(GpuActivatedProducts, FollowDoublePrecision) {
  const auto& [activation, rows, columns, inner, biased] = GetParam();
  const auto options = at::TensorOptions(gpu).dtype(at::kBFloat16);
  const std::int64_t width = activation == Activation::swiglu ? 2 * columns : columns;
  const Tensor x = at::randn({rows, inner}, options), weight = at::randn({width, inner}, options) / std::sqrt(inner);
  const Tensor bias = biased ? at::randn({width}, options) : Tensor();
  const auto made = activated_product(activation, x, weight, bias);
  ASSERT_TRUE(made);
  const auto wide_of = [](const Tensor& t) { return t.to(at::kDouble); };
  Tensor expected = at::mm(wide_of(x), wide_of(weight).t());
  if (biased) expected += wide_of(bias);
  expect_near(made->wide, expected, "wide");
  EXPECT_TRUE(made->active.equal(activate(activation, made->wide)));

  const Tensor dy = at::randn({rows, inner}, options), down = at::randn({inner, columns}, options) / std::sqrt(inner);
  const auto once = activated_product_backward(activation, {.dy = dy, .weight = down, .wide = made->wide});
  const auto again = activated_product_backward(activation, {.dy = dy, .weight = down, .wide = made->wide, .again = true});
  ASSERT_TRUE(once && again);
  EXPECT_TRUE(again->active.equal(made->active));
  EXPECT_TRUE(again->d.wide.equal(once->d.wide));
  const Tensor d_active = at::mm(wide_of(dy), wide_of(down));
  const auto slope = activate_backward(activation, d_active, wide_of(made->wide));
  expect_near(once->d.wide, slope.wide, "the gradient");
  if (activation == Activation::gelu) {
    const Tensor sums = wide_of(once->d.wide).sum(0), off = (wide_of(once->d.column_sums) - sums).abs();
    EXPECT_LE(off.max().item<double>(), 1e-3) << "of sums up to " << sums.abs().max().item<double>();
    EXPECT_TRUE(once->d.column_sums.equal(again->d.column_sums));
  }
}

// A small slope, and two large factors whose product no number holds.
TEST(GpuActivatedProducts, LargeFactorsOfSwigluDoNotOverflow) {
  BONFIRE_SKIP_WITHOUT_GPU();
  if (gpu_info(0).major != 9) GTEST_SKIP() << "they are Hopper's";
  const auto options = at::TensorOptions(gpu).dtype(at::kBFloat16);
  constexpr std::int64_t rows = 5000, columns = 1088, inner = 200;
  constexpr double gate = -20, up = 1e38, d = 100;
  const Tensor wide = at::cat({at::full({rows, columns}, gate, options), at::full({rows, columns}, up, options)}, 1);
  Tensor dy = at::zeros({rows, inner}, options), down = at::zeros({inner, columns}, options);
  dy.select(1, 0).fill_(d);
  down.select(0, 0).fill_(1);
  const auto made = activated_product_backward(Activation::swiglu, {.dy = dy, .weight = down, .wide = wide});
  ASSERT_TRUE(made);
  const double sigmoid = 1 / (1 + std::exp(-gate));
  const auto expect = [&](std::int64_t begin, double want) {
    const Tensor got = made->d.wide.narrow(1, begin, columns).to(at::kDouble);
    EXPECT_LE((got / want - 1).abs().max().item<double>(), 0x1p-6) << got[0][0].item<double>() << " in place of " << want;
  };
  expect(0, sigmoid * (1 + gate * (1 - sigmoid)) * up * d);
  expect(columns, gate * sigmoid * d);
}

// Whoever reads what another thread still writes gives other bits now and then: not in a thousand runs.
TEST_P(GpuActivatedProducts, AThousandRunsGiveEqualBits) {
  const auto& [activation, rows, columns, inner, biased] = GetParam();
  const auto options = at::TensorOptions(gpu).dtype(at::kBFloat16);
  const std::int64_t width = activation == Activation::swiglu ? 2 * columns : columns;
  const Tensor x = at::randn({rows, inner}, options), weight = at::randn({width, inner}, options) / std::sqrt(inner);
  const Tensor bias = biased ? at::randn({width}, options) : Tensor();
  const Tensor dy = at::randn({rows, inner}, options), down = at::randn({inner, columns}, options) / std::sqrt(inner);
  const auto run = [&] {
    const auto made = activated_product(activation, x, weight, bias);
    const auto back = activated_product_backward(activation, {.dy = dy, .weight = down, .wide = made->wide, .again = true});
    std::vector<Tensor> out{made->wide, made->active, back->d.wide, back->active};
    if (activation == Activation::gelu) out.push_back(back->d.column_sums);
    return out;
  };
  const auto first = run();
  Tensor other = at::zeros({}, options.dtype(at::kLong));  // runs, counted on the device: nothing waits between them
  for (int repeat = 0; repeat < 1000; ++repeat) {
    const auto again = run();
    for (std::size_t i = 0; i < first.size(); ++i) {
      const auto bits = first[i].element_size() == 2 ? at::kShort : at::kInt;
      other += (again[i].view(bits) != first[i].view(bits)).any();
    }
  }
  EXPECT_EQ(other.item<std::int64_t>(), 0) << "of 1000 runs";
}

// What they do not take is made of its parts.
TEST(GpuActivatedProducts, LeaveOthersAlone) {
  BONFIRE_SKIP_WITHOUT_GPU();
  const auto options = at::TensorOptions(gpu).dtype(at::kBFloat16);
  const Tensor x = at::randn({16384, 256}, options), weight = at::randn({2048, 256}, options);
  EXPECT_FALSE(activated_product(Activation::gelu, x.to(at::kHalf), weight.to(at::kHalf), {}));
  EXPECT_FALSE(activated_product(Activation::gelu, x.narrow(0, 0, 64), weight, {}));
  EXPECT_FALSE(activated_product(Activation::gelu, x.narrow(1, 0, 128), weight.narrow(1, 0, 128), {}));
  ASSERT_EQ(gpu_info(0).major == 9, activated_product(Activation::gelu, x, weight.narrow(0, 0, 1984), {}).has_value());
  EXPECT_FALSE(activated_product(Activation::gelu, x, weight.flatten().narrow(0, 1, 1984 * 256).view({1984, 256}), {}));
}

// As layers use them: forward hands the activation on, backward the sums for a bias.
TEST(GpuActivatedProducts, InsideLayersFollowTheirParts) {
  BONFIRE_SKIP_WITHOUT_GPU();
  at::manual_seed(5);
  const bonfire::testing::KernelCheck check{.type = at::kBFloat16, .device = gpu};
  for (const bool gated : {true, false})
    for (const bool keep : {true, false}) {
      const bonfire::testing::Feed feed{
          gated ? Activation::swiglu : Activation::gelu, !gated, !gated, 4100, 256, 1088, keep};
      SCOPED_TRACE(name(feed));
      const auto given = feed.inputs();
      const auto first = on(check, given), second = on(check, given);
      const auto together = feed.fused(first), apart = feed.parts(second);
      const Tensor weight = at::randn_like(together[0]);
      const auto a = bonfire::testing::gradients_of(together, first, weight);
      const auto b = bonfire::testing::gradients_of(apart, second, weight);
      const auto distance = [](const Tensor& x, const Tensor& y) {
        return ((x - y).abs().max() / y.abs().max()).item<double>();
      };
      EXPECT_LE(distance(together[0], apart[0]), 0x1p-6);
      for (std::size_t i = 0; i < a.size(); ++i)
        if (b[i].abs().max().item<double>() > 0) EXPECT_LE(distance(a[i], b[i]), 0x1p-6) << i;
    }
}

TEST(GpuFp8, QuantizedIsNear) {
  BONFIRE_SKIP_WITHOUT_GPU();
  at::manual_seed(5);
  for (const auto type : {at::kBFloat16, at::kHalf}) bonfire::testing::expect_quantized_near({.type = type, .device = gpu});
}
TEST(GpuFp8, ScaledWeightsAreNear) {
  BONFIRE_SKIP_WITHOUT_GPU();
  at::manual_seed(5);
  bonfire::testing::expect_scaled_weights_near({.type = at::kBFloat16, .device = gpu});
}
TEST(GpuFp8, ActivationsAreRoundedAtOnce) {
  BONFIRE_SKIP_WITHOUT_GPU();
  at::manual_seed(5);
  for (const auto type : {at::kBFloat16, at::kHalf})
    bonfire::testing::expect_activations_rounded_at_once({.type = type, .device = gpu});
}
TEST(GpuFp8, RandomTensorsAreRoundedAsTheOracleSays) {
  BONFIRE_SKIP_WITHOUT_GPU();
  for (std::uint64_t seed = 0; seed < 120; ++seed)
    bonfire::testing::expect_random_quantized({.type = seed % 3 ? at::kBFloat16 : at::kHalf, .device = gpu}, seed);
}
TEST(GpuFp8, RandomStepsDoNotSpoilLaterOnes) {
  BONFIRE_SKIP_WITHOUT_GPU();
  for (std::uint64_t seed = 0; seed < 60; ++seed)
    bonfire::testing::expect_random_fp8_steps({.type = seed % 3 ? at::kBFloat16 : at::kHalf, .device = gpu}, seed);
}
TEST(GpuFp8, ProductsAreNear) {
  BONFIRE_SKIP_WITHOUT_GPU();
  at::manual_seed(5);
  bonfire::testing::expect_fp8_products_near({.type = at::kBFloat16, .device = gpu});
}

}  // namespace
}  // namespace bonfire::fused_test
