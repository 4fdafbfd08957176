#include "bonfire/kernels/optimizer.h"

#include <gtest/gtest.h>

#include <cmath>

#include <ATen/ATen.h>

#include "bonfire/comm/device.h"
#include "bonfire/kernels/sum_of_squares.h"
#include "tests/support/gpu_ranks.h"
#include "tests/support/update_cases.h"

namespace bonfire::optimizer_test {
namespace {

using at::Tensor;

const c10::Device gpu(c10::kCUDA, 0);

void expect_close(const Tensor& a, const Tensor& b, double tolerance, const char* what) {
  const Tensor x = a.cpu().to(at::kDouble), y = b.cpu().to(at::kDouble);
  EXPECT_LE((x - y).abs().max().item<double>(), tolerance * std::max(1.0, y.abs().max().item<double>())) << what;
}

double tolerance_of(at::ScalarType type) { return type == at::kDouble ? 1e-14 : 2e-6; }

// The CPU's kernels, which share no code with these, are the oracle. An odd offset makes memory that cannot be read in
// packs.
TEST(GpuOptimizer, AdamEqualsTheCpus) {
  BONFIRE_SKIP_WITHOUT_GPU();
  for (const auto type : {at::kFloat, at::kDouble})
    for (const auto gradient_type : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf})
      for (const bool amsgrad : {false, true})
        for (const std::int64_t offset : {0, 1}) {
          const std::int64_t n = 70001;
          const auto fresh = [&](const Tensor& like) { return like.narrow(0, offset, n); };
          const Tensor start = at::randn({n + 1}, type), zeros = at::zeros({n + 1}, type);
          const auto make = [&](c10::Device device) {
            AdamBuffers b{.parameters = fresh(start.to(device, type, false, true)),
                          .gradients = {},
                          .exp_avg = fresh(zeros.to(device, type, false, true)),
                          .exp_avg_sq = fresh(zeros.to(device, type, false, true))};
            if (amsgrad) b.max_exp_avg_sq = fresh(zeros.to(device, type, false, true));
            b.low_precision = at::zeros({n}, at::TensorOptions(device).dtype(at::kBFloat16));
            b.gradient_scale = at::full({}, 0.5, at::TensorOptions(device).dtype(at::kFloat));
            return b;
          };
          AdamBuffers cpu = make(c10::kCPU), device = make(gpu);
          for (int i = 1; i <= 3; ++i) {
            cpu.gradients = fresh(at::randn({n + 1}, gradient_type));
            device.gradients =
                fresh(at::cat({at::zeros({offset}, gradient_type), cpu.gradients, at::zeros({1}, gradient_type)}).to(gpu));
            const AdamStep step{
                .lr = 0.01, .weight_decay = 0.1, .step = i, .gradient_scale = 0.3, .decoupled = amsgrad, .maximize = i == 2};
            adam_(cpu, step);
            adam_(device, step);
          }
          expect_close(device.parameters, cpu.parameters, tolerance_of(type), "parameters");
          expect_close(device.exp_avg, cpu.exp_avg, tolerance_of(type), "exp_avg");
          expect_close(device.exp_avg_sq, cpu.exp_avg_sq, tolerance_of(type), "exp_avg_sq");
          EXPECT_TRUE(device.low_precision.equal(device.parameters.to(at::kBFloat16)));
        }
}

TEST(GpuOptimizer, ManyAtOnceAreAsOneByOne) {
  BONFIRE_SKIP_WITHOUT_GPU();
  testing::expect_many_updates_equal_single_ones(gpu);
}

TEST(GpuOptimizer, SgdEqualsTheCpus) {
  BONFIRE_SKIP_WITHOUT_GPU();
  for (const auto type : {at::kFloat, at::kDouble})
    for (const double momentum : {0.0, 0.9})
      for (const bool nesterov : {false, true}) {
        const Tensor start = at::randn({4099}, type);
        const auto make = [&](c10::Device device) {
          SgdBuffers b{.parameters = start.to(device, type, false, true), .gradients = {}};
          // What is not a number must not be read at the first step.
          b.momentum = at::full({4099}, NAN, at::TensorOptions(device).dtype(type));
          b.low_precision = at::zeros({4099}, at::TensorOptions(device).dtype(at::kHalf));
          return b;
        };
        SgdBuffers cpu = make(c10::kCPU), device = make(gpu);
        for (int i = 1; i <= 3; ++i) {
          cpu.gradients = at::randn({4099}, at::kBFloat16);
          device.gradients = cpu.gradients.to(gpu);
          const SgdStep step{.lr = 0.1,
                             .momentum = momentum,
                             .dampening = nesterov ? 0.0 : 0.1,
                             .weight_decay = 0.01,
                             .step = i,
                             .nesterov = nesterov};
          sgd_(cpu, step);
          sgd_(device, step);
        }
        expect_close(device.parameters, cpu.parameters, tolerance_of(type), "parameters");
        EXPECT_TRUE(device.low_precision.equal(device.parameters.to(at::kHalf)));
      }
}

// Numbers in the device's memory give the bits of numbers that are arguments, and a scale that is none changes nothing.
TEST(GpuOptimizer, NumbersInMemoryAreTheSameNumbers) {
  BONFIRE_SKIP_WITHOUT_GPU();
  for (const auto type : {at::kFloat, at::kDouble}) {
    const auto options = at::TensorOptions(gpu).dtype(type);
    const Tensor start = at::randn({4099}, options), gradients = at::randn({4099}, options);
    const auto make = [&] {
      return AdamBuffers{.parameters = start.clone(),
                         .gradients = gradients,
                         .exp_avg = at::zeros({4099}, options),
                         .exp_avg_sq = at::zeros({4099}, options),
                         .gradient_scale = at::full({}, 0.7, at::TensorOptions(gpu).dtype(at::kDouble))};
    };
    AdamBuffers argument = make(), memory = make();
    SgdBuffers sgd_argument{.parameters = start.clone(), .gradients = gradients, .momentum = at::zeros({4099}, options)};
    SgdBuffers sgd_memory{.parameters = start.clone(), .gradients = gradients, .momentum = at::zeros({4099}, options)};
    const auto on_gpu = [](StepNumbers numbers) {
      return at::from_blob(numbers.data(), {static_cast<std::int64_t>(numbers.size())}, at::kDouble).to(gpu);
    };
    for (int i = 1; i <= 3; ++i) {
      const AdamStep step{.lr = 0.1 / i, .weight_decay = 0.1, .step = i, .maximize = i == 2};
      adam_(argument, step);
      memory.numbers = on_gpu(numbers_of(step));
      adam_(memory, {});
      const SgdStep sgd{.lr = 0.1 / i, .momentum = 0.9, .weight_decay = 0.1, .step = i, .nesterov = true};
      sgd_(sgd_argument, sgd);
      sgd_memory.numbers = on_gpu(numbers_of(sgd));
      sgd_(sgd_memory, {.momentum = 0.9});
      EXPECT_TRUE(memory.parameters.equal(argument.parameters));
      EXPECT_TRUE(memory.exp_avg_sq.equal(argument.exp_avg_sq));
      EXPECT_TRUE(sgd_memory.parameters.equal(sgd_argument.parameters));
    }
    memory.gradient_scale.fill_(NAN);
    adam_(memory, {});
    EXPECT_TRUE(memory.parameters.equal(argument.parameters));
    EXPECT_TRUE(memory.exp_avg.equal(argument.exp_avg));
    sgd_memory.gradient_scale = memory.gradient_scale;
    sgd_(sgd_memory, {.momentum = 0.9});
    EXPECT_TRUE(sgd_memory.parameters.equal(sgd_argument.parameters));
    EXPECT_TRUE(sgd_memory.momentum.equal(sgd_argument.momentum));
  }
}

TEST(GpuOptimizer, SumOfSquaresIsExactAndRepeatable) {
  BONFIRE_SKIP_WITHOUT_GPU();
  for (const auto type : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf})
    for (const std::int64_t n : {0, 1, 255, 1000003}) {
      const Tensor x = at::randn({n}, type);
      const double want = x.to(at::kDouble).square().sum().item<double>();
      const double got = sum_of_squares(x.to(gpu)).item<double>();
      EXPECT_NEAR(got, want, 1e-12 * std::max(1.0, want));
      EXPECT_EQ(sum_of_squares(x.to(gpu)).item<double>(), got);
    }
  // Many of several types, in memory that is aligned and memory that is not, more of them than one launch takes.
  std::vector<Tensor> many;
  double want = 0;
  for (int i = 0; i < 150; ++i) {
    const Tensor x = at::randn({i * 1013 + 1}, i % 3 == 2 ? at::kBFloat16 : at::kFloat);
    const Tensor part = x.narrow(0, i % 2, x.numel() - i % 2);
    want += part.to(at::kDouble).square().sum().item<double>();
    many.push_back(x.to(gpu).narrow(0, i % 2, x.numel() - i % 2));
  }
  const double got = sum_of_squares(many).item<double>();
  EXPECT_NEAR(got, want, 1e-12 * want);
  EXPECT_EQ(sum_of_squares(many).item<double>(), got);
}

}  // namespace
}  // namespace bonfire::optimizer_test
