#include <gtest/gtest.h>

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/ops/randn.h>

#include "bonfire/kernels/activated_product.h"
#include "bonfire/kernels/product.h"
#include "tests/support/fp8_cases.h"
#include "tests/support/fp8_random_cases.h"
#include "tests/support/fused_cases.h"

namespace bonfire::fused_test {
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

// Whoever asks then makes the parts one after the other.
TEST_P(FusedProducts, WithActivationsDoNotComeWithoutAKernel) {
  for (const auto activation : {Activation::swiglu, Activation::gelu}) {
    const auto x = at::randn({7, 5}, GetParam()), weight = at::randn({6, 5}, GetParam());
    const auto wide = at::randn({7, activation == Activation::swiglu ? 12 : 6}, GetParam());
    EXPECT_FALSE(activated_product(activation, x, weight, {}));
    EXPECT_FALSE(activated_product_backward(activation, {.dy = x, .weight = weight.t().contiguous(), .wide = wide}));
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
}  // namespace bonfire::fused_test
