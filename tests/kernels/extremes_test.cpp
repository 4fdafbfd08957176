#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include <ATen/Context.h>
#include <ATen/Parallel.h>

#include "bonfire/kernels/vectorize.h"
#include "tests/support/extreme_cases.h"

namespace bonfire::extremes_test {
namespace {

class Extremes : public ::testing::TestWithParam<at::ScalarType> {
 protected:
  void SetUp() override { at::manual_seed(5); }
};
INSTANTIATE_TEST_SUITE_P(Types, Extremes, ::testing::Values(at::kDouble, at::kFloat, at::kBFloat16, at::kHalf),
                         [](const auto& info) { return std::string(c10::toString(info.param)); });

TEST_P(Extremes, SumsAreRoundedOnce) {
  if (c10::elementSize(GetParam()) > 2) GTEST_SKIP() << "nothing is narrower than its sums";
  bonfire::testing::expect_sums_are_rounded_once({.type = GetParam()});
}
TEST_P(Extremes, ActivationsAreRightEverywhere) {
  bonfire::testing::expect_activations_right_everywhere({.type = GetParam()});
}
TEST_P(Extremes, IgnoredTargetsGiveNothing) { bonfire::testing::expect_ignored_targets_give_nothing({.type = GetParam()}); }

TEST(Exponential, IsRightForEveryNumber) {
  constexpr float infinity = std::numeric_limits<float>::infinity();
  for (float x = -87; x <= 88.7228f; x += 0.0137f) {
    const double want = std::exp(static_cast<double>(x));
    EXPECT_LE(std::abs(static_cast<double>(cpu::exponential(x)) - want), 3e-7 * want) << x;
  }
  for (const float x : {88.73f, 89.f, 1e4f, 3e38f, infinity}) EXPECT_EQ(cpu::exponential(x), infinity) << x;
  for (const float x : {-88.f, -89.f, -1e4f, -3e38f, -infinity}) EXPECT_EQ(cpu::exponential(x), 0) << x;
  for (const float x : {0.f, -0.f, 1e-45f, -1e-38f}) EXPECT_EQ(cpu::exponential(x), 1) << x;
  EXPECT_TRUE(std::isnan(cpu::exponential(std::nanf(""))));
}

}  // namespace
}  // namespace bonfire::extremes_test
