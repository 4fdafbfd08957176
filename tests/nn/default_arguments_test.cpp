#include <optional>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/transformerlayer.h>

#include "bonfire/nn/unit.h"
#include "bonfire/nn/unit_list.h"

namespace bonfire::default_arguments_test {
namespace {

using at::Tensor;

struct Counter : UnitHook {
  void before_forward(UnitSeam&, std::vector<Tensor>& tensors) override {
    ++calls;
    inputs = tensors.size();
  }
  int calls = 0;
  std::size_t inputs = 0;
};

struct DefaultsImpl : torch::nn::Module {
  Tensor forward(const Tensor& x, std::optional<Tensor> scale = std::nullopt, double add = 1) {
    return (scale ? x * *scale : x) + add;
  }
};
BONFIRE_UNIT(Defaults);

struct AllDefaultsImpl : torch::nn::Module {
  Tensor forward(double value = 3, int times = 2) const { return at::full({1}, value * times); }
};
BONFIRE_UNIT(AllDefaults);

TEST(DefaultArguments, AreForwards) {
  Counter counter;
  Defaults block;
  const Tensor x = at::ones({2});
  for (const bool hooked : {false, true}) {
    if (hooked) block->hooks().add(counter);
    EXPECT_TRUE(block(x).equal(x + 1));
    EXPECT_EQ(counter.inputs, hooked ? 1U : 0U);
    EXPECT_TRUE(block->forward(x, x * 3).equal(x * 4));
    EXPECT_EQ(counter.inputs, hooked ? 2U : 0U);
    EXPECT_TRUE(block(x, std::nullopt, 5).equal(x * 6));
  }
  EXPECT_EQ(counter.calls, 3);
  AllDefaults all;
  all->hooks().add(counter);
  const auto& constant = std::as_const(*all);
  EXPECT_EQ(constant.forward().item<double>(), 6);
  EXPECT_EQ(all->forward(4).item<double>(), 8);
  EXPECT_EQ(all(4, 1).item<double>(), 4);
  EXPECT_EQ(counter.calls, 6);
  // What is no argument of forward's is none of the Unit's.
  const auto takes = [](auto& unit, const auto&... arguments) {
    return requires { unit.forward(arguments...); };
  };
  EXPECT_TRUE(takes(*block, x));
  EXPECT_FALSE(takes(*block));
  EXPECT_FALSE(takes(*block, x, x, 1.0, 1));
}

// torch's own way to say them again, for containers.
TEST(DefaultArguments, OfTorchsLayersWorkInContainers) {
  Counter counter;
  UnitOf<torch::nn::TransformerEncoderLayerImpl> layer(torch::nn::TransformerEncoderLayerOptions(4, 2).dropout(0));
  layer->hooks().add(counter);
  torch::nn::Sequential sequence(layer);
  const Tensor x = at::randn({3, 1, 4});
  const auto once = layer(x);
  EXPECT_TRUE(sequence->forward(x).equal(once));
  EXPECT_EQ(counter.calls, 2);
}

}  // namespace
}  // namespace bonfire::default_arguments_test
