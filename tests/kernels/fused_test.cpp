#include <gtest/gtest.h>

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/randn.h>

#include "bonfire/kernels/activated_product.h"
#include "bonfire/kernels/product.h"
#include "tests/support/fp8_cases.h"
#include "tests/support/fp8_random_cases.h"
#include "tests/support/fused_cases.h"

namespace bonfire {
namespace {

class FusedProducts : public ::testing::TestWithParam<at::ScalarType> {
 protected:
  void SetUp() override {
    at::manual_seed(5);
    at::set_num_threads(1);
  }
  static bonfire::testing::KernelCheck check() { return {.type = GetParam()}; }
};
INSTANTIATE_TEST_SUITE_P(Types, FusedProducts, ::testing::Values(at::kDouble, at::kFloat, at::kBFloat16, at::kHalf),
                         [](const auto& info) { return std::string(c10::toString(info.param)); });

TEST_P(FusedProducts, FollowDoublePrecision) { bonfire::testing::expect_fused_products_follow(check()); }
TEST_P(FusedProducts, EqualTheirParts) { bonfire::testing::expect_fused_products_equal_their_parts(check()); }
TEST_P(FusedProducts, BiasGradientsFollow) { bonfire::testing::expect_bias_gradients_follow(check()); }
TEST_P(FusedProducts, FreezingChangesNothingElse) { bonfire::testing::expect_freezing_changes_nothing_else(check()); }

// Devices without a kernel for a product and its activation have the operators all the same.
TEST_P(FusedProducts, WithActivationsAreTheirParts) {
  using at::Tensor;
  using OptionalTensor = std::optional<Tensor>;
  using Forward = std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const OptionalTensor&, bool);
  using Backward = std::tuple<Tensor, Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, bool, bool);
  const auto forward = c10::Dispatcher::singleton().findSchemaOrThrow("bonfire::activated_product", "").typed<Forward>();
  const auto backward =
      c10::Dispatcher::singleton().findSchemaOrThrow("bonfire::activated_product_backward", "").typed<Backward>();
  for (const bool gated : {true, false})
    for (const bool again : {true, false}) {
      const auto activation = gated ? Activation::swiglu : Activation::gelu;
      const Tensor x = at::randn({7, 5}, GetParam()), weight = at::randn({gated ? 12 : 6, 5}, GetParam());
      const Tensor bias = at::randn({weight.size(0)}, GetParam());
      EXPECT_FALSE(activated_product(activation, x, weight, bias));
      const auto [wide, active] = forward.call(x, weight, bias, gated);
      EXPECT_TRUE(wide.equal(product(x, weight.t(), {.bias = bias})));
      EXPECT_TRUE(active.equal(activate(activation, wide)));

      const Tensor dy = at::randn({7, 5}, GetParam()), down = at::randn({5, 6}, GetParam());
      EXPECT_FALSE(activated_product_backward(activation, {.dy = dy, .weight = down, .wide = wide, .again = again}));
      const auto [d_wide, made, sums] = backward.call(dy, down, wide, gated, again);
      const auto expected = activate_backward(activation, product(dy, down), wide);
      EXPECT_TRUE(d_wide.equal(expected.wide));
      EXPECT_TRUE(again ? made.equal(active) : made.numel() == 0);
      EXPECT_TRUE(gated ? sums.numel() == 0 : sums.equal(expected.column_sums));
    }
}

TEST(Fp8, QuantizedIsNear) {
  at::manual_seed(5);
  bonfire::testing::expect_quantized_near({.type = at::kBFloat16});
}
TEST(Fp8, ScaledWeightsAreNear) {
  at::manual_seed(5);
  bonfire::testing::expect_scaled_weights_near({.type = at::kBFloat16});
}
TEST(Fp8, ActivationsAreRoundedAtOnce) {
  at::manual_seed(5);
  bonfire::testing::expect_activations_rounded_at_once({.type = at::kBFloat16});
}
TEST(Fp8, RandomTensorsAreRoundedAsTheOracleSays) {
  for (std::uint64_t seed = 0; seed < 120; ++seed)
    bonfire::testing::expect_random_quantized({.type = seed % 3 ? at::kBFloat16 : at::kHalf}, seed);
}
TEST(Fp8, RandomStepsDoNotSpoilLaterOnes) {
  for (std::uint64_t seed = 0; seed < 60; ++seed)
    bonfire::testing::expect_random_fp8_steps({.type = seed % 3 ? at::kBFloat16 : at::kHalf}, seed);
}
TEST(Fp8, ProductsAreNear) {
  at::manual_seed(5);
  bonfire::testing::expect_fp8_products_near({.type = at::kBFloat16});
}

}  // namespace
}  // namespace bonfire
