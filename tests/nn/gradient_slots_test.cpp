#include "bonfire/nn/gradient_slots.h"

#include <gtest/gtest.h>

#include <map>

#include <ATen/ATen.h>

#include "bonfire/base/error.h"
#include "bonfire/nn/init.h"
#include "bonfire/nn/layers.h"

namespace bonfire::gradient_slots_test {
namespace {

using at::Tensor;

struct Sink : GradientSink {
  explicit Sink(Tensor buffer) : memory(std::move(buffer)) {}
  Tensor buffer(bool& fresh) override {
    fresh = !written;
    written = true;
    return memory;
  }
  void arrived() override { ++arrivals; }

  Tensor memory;
  bool written = false;
  int arrivals = 0;
};

Tensor parameter(at::IntArrayRef sizes, at::ScalarType type) { return at::randn(sizes, type).set_requires_grad(true); }

// Runs two forwards and backwards without and with sinks; the sinks must hold what autograd had.
template <class Module, class Run>
void expect_same_gradients(Module module, const Run& run, at::ScalarType buffer_type, double tolerance) {
  for (int i = 0; i < 2; ++i) run(module).sum().backward();
  std::map<std::string, std::pair<Tensor, std::shared_ptr<Sink>>> sinks;
  for (const auto& item : module->named_parameters()) {
    // What was in the buffer before must not matter.
    auto sink = std::make_shared<Sink>(at::full(item.value().sizes(), NAN, buffer_type));
    sinks[item.key()] = {item.value().grad().clone(), sink};
    EXPECT_EQ(set_gradient_sink(*module, item.key(), sink), 1) << item.key();
    item.value().mutable_grad() = Tensor();
  }
  for (int i = 0; i < 2; ++i) run(module).sum().backward();
  for (const auto& item : module->named_parameters()) {
    const Tensor expected = sinks[item.key()].first;
    const auto sink = sinks[item.key()].second;
    EXPECT_FALSE(item.value().grad().defined()) << item.key();
    EXPECT_EQ(sink->arrivals, 2) << item.key();
    const Tensor difference = sink->memory.to(at::kDouble) - expected.to(at::kDouble);
    EXPECT_LE(difference.abs().max().item<double>(), tolerance * expected.abs().max().item<double>()) << item.key();
    set_gradient_sink(*module, item.key(), nullptr);
  }
  run(module).sum().backward();
  for (const auto& item : module->named_parameters()) EXPECT_TRUE(item.value().grad().defined()) << item.key();
}

TEST(GradientSink, HoldsWhatAutogradWouldHave) {
  at::manual_seed(1);
  for (const auto type : {at::kDouble, at::kFloat}) {
    const double tolerance = type == at::kDouble ? 1e-14 : 1e-5;
    const Tensor x = at::randn({3, 5, 6}, type), tokens = at::randint(7, {3, 5}, at::kLong);
    const auto through = [&](auto module) { return module->forward(x).square(); };
    expect_same_gradients(nn::Linear(parameter({4, 6}, type), parameter({4}, type)), through, type, tolerance);
    expect_same_gradients(nn::Linear(parameter({4, 6}, type)), through, type, tolerance);
    expect_same_gradients(nn::Norm(parameter({6}, type), Tensor(), 1e-5), through, type, tolerance);
    expect_same_gradients(nn::Norm(parameter({6}, type), parameter({6}, type), 1e-5), through, type, tolerance);
    expect_same_gradients(
        nn::Linear(parameter({9, 6}, type)), [&](auto module) { return module->loss(x, tokens); }, type, tolerance);
    expect_same_gradients(
        nn::Embedding(parameter({7, 6}, type)), [&](auto module) { return module->forward(tokens).square(); }, type,
        tolerance);
  }
}

TEST(GradientSink, MayBeWiderThanTheParameter) {
  at::manual_seed(1);
  const Tensor x = at::randn({3, 5, 6}, at::kBFloat16), tokens = at::randint(7, {3, 5}, at::kLong);
  expect_same_gradients(
      nn::Linear(parameter({4, 6}, at::kBFloat16)), [&](auto module) { return module->forward(x).square(); }, at::kFloat,
      0.02);
  expect_same_gradients(
      nn::Embedding(parameter({7, 6}, at::kBFloat16)), [&](auto module) { return module->forward(tokens).square(); },
      at::kFloat, 0.02);
}

// Buffers may be narrower than what forward computes in: gradients that are rounded for their way to other ranks.
TEST(GradientSink, MayRoundWhatItGets) {
  const Tensor x = at::randn({3, 5, 6}), tokens = at::randint(7, {3, 5}, at::kLong);
  const auto through = [&](auto module) { return module->forward(x).square(); };
  expect_same_gradients(nn::Linear(parameter({4, 6}, at::kFloat), parameter({4}, at::kFloat)), through, at::kBFloat16, 0.01);
  expect_same_gradients(nn::Norm(parameter({6}, at::kFloat), parameter({6}, at::kFloat), 1e-5), through, at::kBFloat16,
                        0.01);
  expect_same_gradients(
      nn::Linear(parameter({9, 6}, at::kFloat)), [&](auto module) { return module->loss(x, tokens); }, at::kBFloat16, 0.01);
  expect_same_gradients(
      nn::Embedding(parameter({7, 6}, at::kFloat)), [&](auto module) { return module->forward(tokens).square(); },
      at::kBFloat16, 0.01);
}

TEST(GradientSink, SaysWhereNobodyKnowsSinks) {
  struct Plain : torch::nn::Module {
    Plain() { register_parameter("weight", at::ones({1})); }
  } plain;
  EXPECT_EQ(set_gradient_sink(plain, "weight", std::make_shared<Sink>(at::ones({1}))), 0);
  EXPECT_THROW(set_gradient_sink(plain, "bias", nullptr), Error);
}

TEST(Init, EveryElementIsItsOwnDraw) {
  const Random random = Random(3).fork("name");
  Tensor whole = at::empty({70, 33}, at::kDouble), narrow = at::empty({70, 33}, at::kFloat);
  nn::fill_normal(whole, random, 0.5);
  nn::fill_normal(narrow, random, 0.5);
  for (const std::int64_t i : {0, 1, 32, 33, 1001, 2309})
    EXPECT_NEAR(whole.view(-1)[i].item<double>(), 0.5 * random.normal(static_cast<std::uint64_t>(i)), 1e-15);
  EXPECT_TRUE(narrow.equal(whole.to(at::kFloat)));
  Tensor turned = at::empty({33, 70}, at::kDouble);
  nn::fill_normal(turned.t(), random, 0.5);
  EXPECT_TRUE(turned.t().equal(whole));
}

}  // namespace
}  // namespace bonfire::gradient_slots_test
