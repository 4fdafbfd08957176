// Shares that are neither an Engine's nor a Pipeline's: the slice of a model that a server updates with what workers send.
#include <algorithm>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adamw.h>

#include "bonfire/base/error.h"
#include "bonfire/optim/optimizer.h"
#include "bonfire/shard/flat_parameter.h"
#include "tests/support/ranks.h"
#include "tests/support/thrown.h"

namespace bonfire::server_slice_test {
namespace {

constexpr int workers = 3, servers = 2, steps = 4;
constexpr double clip = 0.5;

at::Tensor numbers(at::IntArrayRef shape, double shift) {
  auto values = at::zeros(shape, at::kDouble);
  values.view({-1}).copy_(at::arange(values.numel(), at::kDouble).add(shift).mul(1.7).sin());
  return values;
}

// The weights of the model; server `s` has numbers s, s + servers and so on.
std::vector<at::Tensor> weights() { return {numbers({5, 3}, 1), numbers({7}, 2), numbers({2, 9}, 3)}; }

class ServerSlice final : public Shares {
 public:
  ServerSlice(Group all, std::vector<at::Tensor> weights) : all_(std::move(all)) {
    std::vector<plan::ParameterSize> sizes;
    for (auto& weight : weights) {
      weight.requires_grad_(true);
      sizes.push_back({.name = std::to_string(sizes.size()),
                       .elements = weight.numel(),
                       .shape = weight.sizes().vec(),
                       .compute = plan::Dtype::fp64,
                       .master = plan::Dtype::fp64});
    }
    const auto layout = plan::bucket({{"slice", sizes}}, {}).front();
    std::vector<at::Tensor> in_order;
    for (const auto& segment : layout.segments) in_order.push_back(weights[std::stoul(segment.name)]);
    flat_ = std::make_unique<FlatParameter>(layout, std::move(in_order), FlatOptions{});
  }

  void push(std::size_t weight, const at::Tensor& gradient) {
    const auto sum = flat_->gradient_view(flat_->segment(std::to_string(weight)));
    pushed_ == 0 ? sum.copy_(gradient) : sum.add_(gradient);
  }
  void end_push() { ++pushed_; }
  at::Tensor pull(std::size_t weight) const {
    return flat_->parameters()[flat_->segment(std::to_string(weight))].detach().clone();
  }
  int versions() const { return versions_; }

  std::vector<Part> parts() const override { return {{.flat = flat_.get()}}; }
  std::int64_t layout_version() const override { return 0; }
  Division division() const override { return {}; }
  at::Device device() const override { return at::kCPU; }
  void sum(at::Tensor& numbers) const override { all_.all_reduce(numbers).wait(); }
  void require_gradients() const override { require(pushed_ == workers, "{} of {} workers have pushed", pushed_, workers); }
  void spend_gradients(const GradientUse&) override { pushed_ = 0; }
  void updated(std::size_t) override { ++versions_; }
  void finish_update() override {}

 private:
  Group all_;
  std::unique_ptr<FlatParameter> flat_;
  int pushed_ = 0, versions_ = 0;
};

// Servers that clip to the norm of the whole model train like one process.
TEST(ServerSlice, AnOptimizerUpdatesIt) {
  auto expected = weights();
  for (auto& weight : expected) weight.requires_grad_(true);
  torch::optim::AdamW theirs(expected, torch::optim::AdamWOptions(0.1).weight_decay(0.05));
  const auto gradient = [](std::size_t weight, int worker, int step) {
    return numbers(weights()[weight].sizes(), static_cast<double>(10 * step + worker) + 0.1 * static_cast<double>(weight));
  };
  std::vector<double> norms;
  for (int step = 0; step < steps; ++step) {
    theirs.zero_grad();
    for (std::size_t at = 0; at < expected.size(); ++at) {
      expected[at].mutable_grad() = gradient(at, 0, step);
      for (int worker = 1; worker < workers; ++worker) expected[at].mutable_grad().add_(gradient(at, worker, step));
    }
    norms.push_back(torch::nn::utils::clip_grad_norm_(expected, clip));
    theirs.step();
  }

  testing::run_ranks(servers, [&](World& world) {
    const auto me = static_cast<std::size_t>(world.rank());
    std::vector<at::Tensor> mine;
    std::vector<std::size_t> of;
    for (std::size_t at = me; at < expected.size(); at += servers) {
      of.push_back(at);
      mine.push_back(weights()[at]);
    }
    ServerSlice slice(world.group(), mine);
    AdamW optimizer(slice, {.lr = 0.1, .weight_decay = 0.05});
    testing::expect_part(testing::thrown<Error>([&] { optimizer.step(); }), "0 of 3 workers have pushed");
    for (int step = 0; step < steps; ++step) {
      for (int worker = 0; worker < workers; ++worker) {
        for (std::size_t at = 0; at < of.size(); ++at) slice.push(at, gradient(of[at], worker, step));
        slice.end_push();
      }
      const auto result = optimizer.step({.clip = clip});
      EXPECT_NEAR(result.gradient_norm, norms[static_cast<std::size_t>(step)], 1e-12 * result.gradient_norm);
      EXPECT_EQ(slice.versions(), step + 1);
    }
    for (std::size_t at = 0; at < of.size(); ++at)
      EXPECT_LT((slice.pull(at) - expected[of[at]]).abs().max().item<double>(), 1e-7) << "weight " << of[at];
  });
}

}  // namespace
}  // namespace bonfire::server_slice_test
