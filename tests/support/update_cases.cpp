#include "tests/support/update_cases.h"

#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include "bonfire/kernels/optimizer.h"

namespace bonfire::testing {

using at::Tensor;

void expect_many_updates_equal_single_ones(c10::Device device) {
  const std::int64_t sizes[] = {1, 5, 4096, 4097, 20000, 0, 333};
  std::vector<AdamBuffers> many, single;
  std::vector<AdamStep> steps;
  const auto scale = at::full({}, 0.5, at::TensorOptions(device).dtype(at::kDouble));
  for (int at = 0; at < 150; ++at) {
    const auto n = sizes[at % 7];
    const auto fresh = [&](at::ScalarType type) { return at::randn({n + 1}).to(device, type).narrow(0, at % 2, n); };
    const auto gradient_type = at < 60 ? at::kFloat : at < 70 ? at::kBFloat16 : at::kHalf;
    AdamBuffers buffers{.parameters = fresh(at::kFloat),
                        .gradients = fresh(gradient_type),
                        .exp_avg = fresh(at::kFloat),
                        .exp_avg_sq = fresh(at::kFloat).abs_()};
    if (at % 3 == 0) buffers.low_precision = fresh(at::kBFloat16);
    if (at % 5 == 0) buffers.gradient_scale = scale;
    many.push_back(buffers);
    for (auto which :
         {&AdamBuffers::parameters, &AdamBuffers::exp_avg, &AdamBuffers::exp_avg_sq, &AdamBuffers::low_precision})
      if ((buffers.*which).defined()) buffers.*which = (buffers.*which).clone();
    single.push_back(buffers);
    steps.push_back({.lr = 0.01 * (at + 1), .weight_decay = at % 2 ? 0.1 : 0, .step = at + 1, .maximize = at % 4 == 1});
  }
  adam_(many, steps);
  for (std::size_t at = 0; at < single.size(); ++at) {
    adam_(single[at], steps[at]);
    EXPECT_TRUE(many[at].parameters.equal(single[at].parameters)) << at;
    EXPECT_TRUE(many[at].exp_avg.equal(single[at].exp_avg)) << at;
    EXPECT_TRUE(many[at].exp_avg_sq.equal(single[at].exp_avg_sq)) << at;
    if (!many[at].low_precision.defined()) continue;
    EXPECT_TRUE(many[at].low_precision.equal(single[at].low_precision)) << at;
  }
}

}  // namespace bonfire::testing
