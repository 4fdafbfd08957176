#include "bonfire/kernels/optimizer.h"

#include <gtest/gtest.h>

#include <cmath>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include "bonfire/base/error.h"
#include "bonfire/kernels/sum_of_squares.h"
#include "tests/support/update_cases.h"

namespace bonfire::optimizer_test {
namespace {

using at::Tensor;

void expect_close(const Tensor& a, const Tensor& b, double tolerance, const char* what) {
  const Tensor x = a.to(at::kDouble), y = b.to(at::kDouble);
  EXPECT_LE((x - y).abs().max().item<double>(), tolerance * std::max(1.0, y.abs().max().item<double>())) << what;
}

// Adam as its paper writes it, in double, one element at a time in a tensor's operators.
struct ReferenceAdam {
  Tensor p, m = at::zeros_like(p), v = at::zeros_like(p), top = at::zeros_like(p);

  void step(Tensor g, const AdamStep& s, bool amsgrad) {
    g = g.to(at::kDouble) * s.gradient_scale * (s.maximize ? -1 : 1);
    if (!s.decoupled) g = g + s.weight_decay * p;
    m = s.beta1 * m + (1 - s.beta1) * g;
    v = s.beta2 * v + (1 - s.beta2) * g * g;
    top = at::max(top, v);
    const Tensor m_hat = m / (1 - std::pow(s.beta1, s.step));
    const Tensor v_hat = (amsgrad ? top : v) / (1 - std::pow(s.beta2, s.step));
    if (s.decoupled) p = p - s.lr * s.weight_decay * p;
    p = p - s.lr * m_hat / (v_hat.sqrt() + s.eps);
  }
};

void run_adam(at::ScalarType parameter_type, at::ScalarType gradient_type, bool amsgrad, bool decoupled, double tolerance) {
  for (const std::int64_t n : {1, 7, 4099, 70001}) {
    Tensor p = at::randn({n}, parameter_type);
    ReferenceAdam reference{.p = p.to(at::kDouble).clone()};
    AdamBuffers buffers{.parameters = p, .gradients = {}, .exp_avg = at::zeros_like(p), .exp_avg_sq = at::zeros_like(p)};
    if (amsgrad) buffers.max_exp_avg_sq = at::zeros_like(p);
    buffers.low_precision = at::zeros_like(p, at::TensorOptions(at::kBFloat16));
    for (int i = 1; i <= 3; ++i) {
      buffers.gradients = at::randn({n}, gradient_type) * (4 - i);
      const AdamStep step{
          .lr = 0.01, .weight_decay = 0.1, .step = i, .gradient_scale = 0.3, .decoupled = decoupled, .maximize = n == 7};
      adam_(buffers, step);
      reference.step(buffers.gradients, step, amsgrad);
    }
    expect_close(p, reference.p, tolerance, "parameters");
    expect_close(buffers.exp_avg, reference.m, tolerance, "exp_avg");
    expect_close(buffers.exp_avg_sq, reference.v, tolerance, "exp_avg_sq");
    EXPECT_TRUE(buffers.low_precision.equal(p.to(at::kBFloat16)));
  }
}

TEST(Adam, EqualsItsDefinition) {
  for (const bool amsgrad : {false, true})
    for (const bool decoupled : {false, true}) {
      run_adam(at::kDouble, at::kDouble, amsgrad, decoupled, 1e-14);
      run_adam(at::kFloat, at::kFloat, amsgrad, decoupled, 2e-6);
      run_adam(at::kFloat, at::kBFloat16, amsgrad, decoupled, 2e-6);
      run_adam(at::kFloat, at::kHalf, amsgrad, decoupled, 2e-6);
    }
}

TEST(Adam, ScaleTensorMultipliesTheScale) {
  const Tensor p = at::randn({100}), g = at::randn({100});
  AdamBuffers a{.parameters = p.clone(), .gradients = g, .exp_avg = at::zeros_like(p), .exp_avg_sq = at::zeros_like(p)};
  AdamBuffers b{.parameters = p.clone(), .gradients = g, .exp_avg = at::zeros_like(p), .exp_avg_sq = at::zeros_like(p)};
  b.gradient_scale = at::scalar_tensor(0.5);
  adam_(a, {.gradient_scale = 0.25});
  adam_(b, {.gradient_scale = 0.5});
  EXPECT_TRUE(a.parameters.equal(b.parameters));
  EXPECT_TRUE(a.exp_avg.equal(b.exp_avg));
}

TEST(Adam, ManyAtOnceAreAsOneByOne) { testing::expect_many_updates_equal_single_ones(c10::kCPU); }

TEST(Adam, RefusesBuffersThatDoNotFit) {
  const Tensor p = at::randn({10});
  EXPECT_THROW(adam_({p, at::randn({9}), at::zeros_like(p), at::zeros_like(p)}, {}), Error);
  EXPECT_THROW(adam_({p, at::randn({10}), at::zeros_like(p).to(at::kDouble), at::zeros_like(p)}, {}), Error);
  EXPECT_THROW(adam_({p, at::randn({20}).slice(0, 0, 20, 2), at::zeros_like(p), at::zeros_like(p)}, {}), Error);
  AdamBuffers scaled{p, at::randn({10}), at::zeros_like(p), at::zeros_like(p)};
  scaled.gradient_scale = at::ones({2});
  EXPECT_THROW(adam_(scaled, {}), Error);
  EXPECT_THROW(sgd_({.parameters = p, .gradients = p.clone(), .gradient_scale = at::ones({2})}, {}), Error);
  const std::vector<AdamBuffers> two(2, {p, at::randn({10}), at::zeros_like(p), at::zeros_like(p)});
  EXPECT_THROW(adam_(two, std::vector<AdamStep>(1)), Error);
}

TEST(Sgd, EqualsItsDefinition) {
  for (const at::ScalarType type : {at::kFloat, at::kDouble})
    for (const double momentum : {0.0, 0.9})
      for (const bool nesterov : {false, true}) {
        if (nesterov && momentum == 0) continue;
        const double dampening = nesterov || momentum == 0 ? 0 : 0.2;
        Tensor p = at::randn({4099}, type), buffer = at::full({4099}, NAN, type);
        Tensor expected = p.to(at::kDouble).clone(), moved;
        for (int i = 1; i <= 3; ++i) {
          const Tensor g = at::randn({4099}, type);
          sgd_({.parameters = p, .gradients = g, .momentum = buffer}, {.lr = 0.1,
                                                                       .momentum = momentum,
                                                                       .dampening = dampening,
                                                                       .weight_decay = 0.01,
                                                                       .step = i,
                                                                       .gradient_scale = 2,
                                                                       .nesterov = nesterov});
          const Tensor d = g.to(at::kDouble) * 2 + 0.01 * expected;
          moved = i == 1 ? d : momentum * moved + (1 - dampening) * d;
          expected = expected - 0.1 * (nesterov ? d + momentum * moved : (momentum == 0 ? d : moved));
        }
        expect_close(p, expected, type == at::kFloat ? 2e-6 : 1e-14, "parameters");
      }
}

TEST(SumOfSquares, IsExactAndIndependentOfThreads) {
  for (const at::ScalarType type : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
    const Tensor x = at::randn({100003}, type);
    const double expected = x.to(at::kDouble).square().sum().item<double>();
    const Tensor sum = sum_of_squares(x);
    EXPECT_EQ(sum.scalar_type(), at::kDouble);
    EXPECT_NEAR(sum.item<double>(), expected, 1e-12 * expected);
    at::set_num_threads(1);
    EXPECT_EQ(sum_of_squares(x).item<double>(), sum.item<double>());
    at::set_num_threads(2);
    const Tensor other = at::randn({77}, at::kFloat);
    EXPECT_NEAR(sum_of_squares({x, other}).item<double>(), expected + other.to(at::kDouble).square().sum().item<double>(),
                1e-12 * expected);
  }
  EXPECT_EQ(sum_of_squares(at::randn({0})).item<double>(), 0);
}

}  // namespace
}  // namespace bonfire::optimizer_test
