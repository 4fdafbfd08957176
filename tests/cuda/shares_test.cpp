// Kernels whose blocks draw what they work on: who draws what changes no bit.
#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <vector>

#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "bonfire/comm/captured_work.h"
#include "bonfire/comm/cuda_plugin.h"
#include "bonfire/comm/device.h"
#include "bonfire/kernels/activated_product.h"
#include "bonfire/kernels/cross_entropy.h"
#include "bonfire/kernels/product.h"
#include "tests/support/gpu_ranks.h"

namespace bonfire::shares_test {
namespace {

using at::Tensor;
using Tensors = std::vector<Tensor>;

const c10::Device gpu(c10::kCUDA, 0);

class GpuShares : public ::testing::Test {
 protected:
  void SetUp() override {
    BONFIRE_SKIP_WITHOUT_GPU();
    if (gpu_info(0).major != 9) GTEST_SKIP() << "kernels that draw are Hopper's";
    at::manual_seed(5);
  }
  void TearDown() override {
    if (!gpu_available()) return;
    cuda_plugin().plugin->draw_shares(true);
    cuda_plugin().plugin->leave_multiprocessors(0);
  }

  static Tensor random(at::IntArrayRef sizes) { return at::randn(sizes, at::TensorOptions(gpu).dtype(at::kBFloat16)); }
};

// One product with its gradient, and the loss of rows that two multiprocessors share, and four.
class Drawing {
 public:
  Tensors run() const {
    const auto made = activated_product(Activation::gelu, x_, weight_, bias_);
    const auto back =
        activated_product_backward(Activation::gelu, {.dy = x_, .weight = down_, .wide = made->wide, .again = true});
    Tensors out{made->wide, made->active, back->d.wide, back->d.column_sums};
    for (const Tensor& given : logits_) {
      const Tensor logits = given.detach().clone().set_requires_grad(true);
      const Tensor loss = cross_entropy(logits, target_, {.mean = false});
      loss.backward();
      out.insert(out.end(), {loss.detach(), logits.grad()});
    }
    return out;
  }

 private:
  static Tensor random(at::IntArrayRef sizes) { return at::randn(sizes, at::TensorOptions(gpu).dtype(at::kBFloat16)); }

  Tensor x_ = random({8333, 136}), weight_ = random({1344, 136}) / std::sqrt(136), bias_ = random({1344}),
         down_ = random({136, 1344});
  Tensors logits_{random({301, 128256}), random({301, 200000})};
  Tensor target_ = at::randint(100000, {301}, at::TensorOptions(gpu).dtype(at::kLong));
};

void expect_equal(const Tensors& a, const Tensors& b) {
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(a[i].equal(b[i])) << i;
}

TEST_F(GpuShares, FixedOrDrawnGiveEqualBits) {
  const Drawing work;
  cuda_plugin().plugin->draw_shares(false);
  const Tensors fixed = work.run();
  cuda_plugin().plugin->draw_shares(true);
  for (int repeat = 0; repeat < 20; ++repeat) expect_equal(work.run(), fixed);
}

// A launch that is captured counts by itself, however often it is replayed and whatever runs beside it.
TEST_F(GpuShares, ReplaysBesideOthersGiveEqualBits) {
  const c10::impl::VirtualGuardImpl device(c10::kCUDA);
  const c10::Stream first = device.getStreamFromGlobalPool(gpu), second = device.getStreamFromGlobalPool(gpu);
  const Drawing work;
  synchronize(gpu);
  const c10::StreamGuard guard(first);
  const Tensors wanted = work.run();
  synchronize(gpu);
  const auto graph = make_captured_work(gpu);
  Tensors captured;
  graph->capture([&] { captured = work.run(); });
  for (int repeat = 0; repeat < 20; ++repeat) {
    graph->replay();
    Tensors beside;
    {
      const c10::StreamGuard other(second);
      beside = work.run();
    }
    synchronize(gpu);
    expect_equal(captured, wanted);
    expect_equal(beside, wanted);
  }
}

TEST_F(GpuShares, ProductsLeaveMultiprocessorsToOthers) {
  for (const int taken : {0, 16, 1000}) {
    cuda_plugin().plugin->leave_multiprocessors(taken);
    const Tensor a = random({1000, 512}), b = random({512, 768}), made = product(a, b);
    const Tensor wanted = at::mm(a.to(at::kDouble), b.to(at::kDouble));
    EXPECT_LE(((made.to(at::kDouble) - wanted).norm() / wanted.norm()).item<double>(), 5e-3) << taken;
    EXPECT_TRUE(product(a, b).equal(made));
  }
}

}  // namespace
}  // namespace bonfire::shares_test
