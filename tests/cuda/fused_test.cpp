#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include "bonfire/comm/device.h"
#include "bonfire/kernels/product.h"
#include "bonfire/kernels/qkv.h"
#include "tests/support/fp8_cases.h"
#include "tests/support/fused_cases.h"
#include "tests/support/gpu_ranks.h"

namespace bonfire {
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
TEST(GpuFp8, ProductsAreNear) {
  BONFIRE_SKIP_WITHOUT_GPU();
  at::manual_seed(5);
  bonfire::testing::expect_fp8_products_near({.type = at::kBFloat16, .device = gpu});
}

}  // namespace
}  // namespace bonfire
