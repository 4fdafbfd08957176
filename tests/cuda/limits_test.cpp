// Kernels on GPUs that have less: what a block may have of shared memory is that of other generations.
#include <gtest/gtest.h>

#include <string>
#include <tuple>

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include "bonfire/comm/cuda_plugin.h"
#include "bonfire/comm/device.h"
#include "bonfire/kernels/cross_entropy.h"
#include "tests/support/gpu_ranks.h"

namespace bonfire::limits_test {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

const c10::Device gpu(c10::kCUDA, 0);

template <class Signature, class... Arguments>
auto call(const char* name, Arguments... arguments) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>().call(arguments...);
}

// KiB for a block: no GPU since Ampere has as little as the first; then Ada and consumer's cards, A100, and all that there
// is.
class GpuSharedMemory : public ::testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    BONFIRE_SKIP_WITHOUT_GPU();
    at::manual_seed(5);
    cuda_plugin().plugin->limit_shared_memory(GetParam() * 1024);
  }
  void TearDown() override {
    if (gpu_available()) cuda_plugin().plugin->limit_shared_memory(0);
  }
};
INSTANTIATE_TEST_SUITE_P(KiB, GpuSharedMemory, ::testing::Values(48, 99, 163, 0),
                         [](const auto& info) { return info.param ? std::to_string(info.param) : std::string("All"); });

struct NormCase {
  std::int64_t rows, columns;
  at::ScalarType type = at::kBFloat16;
  bool centered = false;
  bool whole = true;  // with the stream's gradient, the norm made again and, of a layer norm, the sums of dx
};

// How far each of backward's results is from what doubles make of the same numbers, relative to the length of that: on the
// device, and over its tolerance. More than 1 is wrong, and so is what is no number.
Tensor norm_errors(const NormCase& c) {
  const auto options = at::TensorOptions(gpu).dtype(c.type);
  const auto wide = c.type == at::kDouble ? at::kDouble : at::kFloat;
  const Tensor x = at::randn({c.rows, c.columns}, options) + 0.5, dy = at::randn({c.rows, c.columns}, options),
               weight = at::randn({c.columns}, options), bias = at::randn({c.columns}, options);
  const OptionalTensor ds = c.whole ? OptionalTensor(at::randn({c.rows, c.columns}, options)) : std::nullopt;
  const auto to_double = [](const Tensor& t) { return t.to(at::kDouble); };
  const Tensor exact = to_double(x), mean = c.centered ? exact.mean(1, true) : at::zeros({c.rows, 1}, exact.options()),
               middle = exact - mean, rstd = ((middle * middle).mean(1, true) + 1e-5).rsqrt();
  // As forward hands them on: rounded, and then taken for exact.
  const Tensor given_mean = mean.flatten().to(wide), given_rstd = rstd.flatten().to(wide);
  const Tensor inverse = to_double(given_rstd).unsqueeze(1);
  const Tensor scaled = (exact - to_double(given_mean).unsqueeze(1)) * inverse, g = to_double(dy) * to_double(weight);
  Tensor dx = inverse * (g - (c.centered ? g.mean(1, true) : at::zeros_like(inverse)) - scaled * (g * scaled).mean(1, true));
  if (ds) dx = dx + to_double(*ds);
  const double rounding = c.type == at::kDouble  ? 1e-13
                          : c.type == at::kFloat ? 1e-6
                          : c.type == at::kHalf  ? 1e-3
                                                 : 5e-3,
               of_sums = c.type == at::kDouble ? 1e-13 : 1e-5;
  std::vector<Tensor> errors;
  const auto compare = [&](const Tensor& got, const Tensor& want, double tolerance) {
    errors.push_back((to_double(got) - want).norm() / (want.norm() + 1e-3) / tolerance);
  };
  if (c.centered) {
    using Backward = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>(const Tensor&, const OptionalTensor&, const Tensor&,
                                                                        const Tensor&, const Tensor&, const Tensor&,
                                                                        const OptionalTensor&, bool);
    const auto [got, d_weight, d_bias, normed, sums] =
        call<Backward>("bonfire::layer_norm_backward", dy, ds, x, weight, given_mean, given_rstd,
                       c.whole ? OptionalTensor(bias) : std::nullopt, c.whole);
    compare(got, dx, rounding);
    compare(d_weight, (to_double(dy) * scaled).sum(0), of_sums);
    compare(d_bias, to_double(dy).sum(0), of_sums);
    if (c.whole) {
      compare(normed, scaled * to_double(weight) + to_double(bias), rounding);
      compare(sums, to_double(got).sum(0), of_sums);
    }
  } else {
    using Backward = std::tuple<Tensor, Tensor, Tensor>(const Tensor&, const OptionalTensor&, const Tensor&, const Tensor&,
                                                        const Tensor&, bool);
    const auto [got, d_weight, normed] =
        call<Backward>("bonfire::rms_norm_backward", dy, ds, x, weight, given_rstd, c.whole);
    compare(got, dx, rounding);
    compare(d_weight, (to_double(dy) * scaled).sum(0), of_sums);
    if (c.whole) compare(normed, scaled * to_double(weight), rounding);
  }
  return at::stack(errors);
}

void expect_right(const NormCase& c) {
  const Tensor errors = norm_errors(c);
  EXPECT_TRUE((errors <= 1).all().item<bool>())
      << c.rows << " rows of " << c.columns << " in " << c10::toString(c.type) << (c.centered ? ", centered" : "")
      << (c.whole ? ", with all" : "") << ": errors over their tolerance are " << errors.cpu();
}

TEST_P(GpuSharedMemory, BackwardOfNorms) {
  for (const auto type : {at::kBFloat16, at::kHalf, at::kFloat, at::kDouble})
    for (const bool centered : {false, true})
      for (const bool whole : {false, true}) {
        for (const std::int64_t columns :
             {64, 65, 200, 512, 768, 1024, 1600, 2048, 3000, 4096, 5120, 8192, 8200, 12288, 16384})
          expect_right({37, columns, type, centered, whole});
        // Rows enough for every block to fetch many.
        for (const std::int64_t columns : {64, 768, 2048, 4096, 8192}) expect_right({4001, columns, type, centered, whole});
      }
}

// Each and every one, in the type that models train in. Asking the device once for many of them is what makes it quick.
TEST_P(GpuSharedMemory, BackwardOfNormsOfEveryLength) {
  constexpr std::int64_t at_once = 128;
  for (std::int64_t first = 64; first <= 16384; first += at_once) {
    std::vector<Tensor> worst;
    const std::int64_t last = std::min<std::int64_t>(first + at_once - 1, 16384);
    for (std::int64_t columns = first; columns <= last; ++columns)
      for (const bool centered : {false, true}) {
        const Tensor errors = norm_errors({9, columns, at::kBFloat16, centered, columns % 3 != 0});
        worst.push_back((errors <= 1).all());
      }
    if (at::stack(worst).all().item<bool>()) continue;
    for (std::int64_t columns = first; columns <= last; ++columns)
      for (const bool centered : {false, true}) expect_right({9, columns, at::kBFloat16, centered, columns % 3 != 0});
    FAIL() << "rows of " << first << " to " << last << " elements";
  }
}

TEST_P(GpuSharedMemory, CrossEntropy) {
  for (const auto type : {at::kBFloat16, at::kHalf, at::kFloat, at::kDouble})
    for (const std::int64_t classes : {1000, 12288, 20000, 32000, 50257, 50304, 128256, 200000}) {
      SCOPED_TRACE(::testing::Message() << classes << " classes in " << c10::toString(type));
      const std::int64_t rows = 141;
      Tensor target = at::randint(classes, {rows}, at::TensorOptions(gpu).dtype(at::kLong));
      target[3] = -100;
      const Tensor logits = (at::randn({rows, classes}, gpu) * 2).to(type).set_requires_grad(true);
      const Tensor reference = logits.detach().to(at::kDouble).set_requires_grad(true);
      const Tensor loss = bonfire::cross_entropy(logits, target, {.mean = false});
      const Tensor want = at::cross_entropy_loss(reference, target, {}, at::Reduction::Sum);
      loss.backward();
      want.backward();
      EXPECT_NEAR(loss.item<double>() / want.item<double>(), 1, 1e-6);
      const double error =
          ((logits.grad().to(at::kDouble) - reference.grad()).norm() / reference.grad().norm()).item<double>();
      EXPECT_LE(error, type == at::kDouble ? 1e-13 : type == at::kFloat ? 1e-6 : type == at::kHalf ? 1e-3 : 5e-3);
    }
}

}  // namespace
}  // namespace bonfire::limits_test
