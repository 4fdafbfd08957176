#include "tests/support/kernel_check.h"

#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

namespace bonfire::testing {

using at::Tensor;

double tolerance_of(at::ScalarType type) {
  switch (type) {
    case at::kDouble: return 1e-13;
    case at::kFloat: return 5e-6;
    case at::kHalf: return 4e-3;
    default: return 3e-2;
  }
}

namespace {

// Gradients of a weighted sum of the outputs.
std::pair<Tensors, Tensors> run(const Function& function, const Tensors& inputs, const Tensors& weights) {
  const Tensors outputs = function(inputs);
  Tensor total = at::zeros({}, inputs[0].options().dtype(at::kDouble).requires_grad(false));
  for (std::size_t i = 0; i < outputs.size(); ++i)
    total =
        total +
        (outputs[i].to(at::kDouble) * weights[i].to(outputs[i].device(), outputs[i].scalar_type()).to(at::kDouble)).sum();
  total.backward();
  Tensors gradients;
  for (const Tensor& input : inputs) gradients.push_back(input.grad());
  return {outputs, gradients};
}

}  // namespace

void expect_follows(const Function& ours, const Function& reference, const Tensors& given, const KernelCheck& check) {
  Tensors rounded, wide;
  for (std::size_t i = 0; i < given.size(); ++i) {
    const auto type = check.kept_fp32.count(i) ? at::kFloat : check.type;
    rounded.push_back(given[i].to(check.device, type, false, /*copy=*/true).set_requires_grad(true));
    wide.push_back(rounded.back().detach().to(at::kCPU, at::kDouble, false, /*copy=*/true).set_requires_grad(true));
  }
  Tensors weights;
  {
    at::NoGradGuard no_grad;
    for (const Tensor& out : reference(wide)) weights.push_back(at::randn_like(out).to(check.type).to(at::kDouble));
  }
  const auto [expected, expected_gradients] = run(reference, wide, weights);
  const auto [actual, gradients] = run(ours, rounded, weights);
  const auto compare = [&](const Tensor& on_device, const Tensor& b, const char* what, std::size_t i) {
    ASSERT_TRUE(on_device.defined() && b.defined()) << what << " " << i;
    ASSERT_EQ(on_device.sizes(), b.sizes()) << what << " " << i;
    const Tensor a = on_device.detach().to(at::kCPU, at::kDouble);
    const double scale = b.numel() ? std::max(1.0, b.abs().max().item<double>()) : 1;
    const double error = b.numel() ? (a - b).abs().max().item<double>() : 0;
    EXPECT_LE(error, tolerance_of(check.type) * scale) << what << " " << i << " in " << c10::toString(check.type);
  };
  for (std::size_t i = 0; i < expected.size(); ++i) compare(actual[i], expected[i], "output", i);
  for (std::size_t i = 0; i < given.size(); ++i) compare(gradients[i], expected_gradients[i], "gradient", i);
}

}  // namespace bonfire::testing
