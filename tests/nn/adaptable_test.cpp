// Adapters over torch's linear layers in a module of a user's.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include <torch/torch.h>

#include "bonfire/base/error.h"
#include "bonfire/nn/adapters.h"
#include "bonfire/nn/sequential.h"
#include "tests/support/thrown.h"

namespace bonfire::adaptable_test {
namespace {

using at::Tensor;
using testing::thrown;

struct NetImpl : torch::nn::Module {
  Tensor forward(const Tensor& x) { return last->forward(at::gelu(two->forward(at::tanh(one->forward(x))))); }

  AdaptableLinear one = register_module("one", AdaptableLinear(5, 7));
  AdaptableLinear two = register_module("two", AdaptableLinear(torch::nn::LinearOptions(7, 6).bias(false)));
  torch::nn::Linear last = register_module("last", torch::nn::Linear(6, 2));
};
TORCH_MODULE(Net);

Net made(std::uint64_t seed) {
  torch::manual_seed(seed);
  Net net;
  net->to(at::kDouble);
  return net;
}

TEST(AdaptableLinear, IsTorchsUntilItIsAdapted) {
  const Net net = made(1);
  const auto names = net->named_parameters().keys();
  EXPECT_EQ(names, (std::vector<std::string>{"one.weight", "one.bias", "two.weight", "last.weight", "last.bias"}));
  const Tensor x = at::randn({3, 4, 5}, at::kDouble);
  EXPECT_TRUE(Net(net)->one->forward(x).equal(at::linear(x, net->one->weight, net->one->bias)));
}

TEST(AdaptableLinear, TrainsTheAdaptersAlone) {
  Net net = made(2);
  const Tensor x = at::randn({3, 4, 5}, at::kDouble), before = net->forward(x).detach();
  EXPECT_EQ(add_adapters(*net, {.rank = 2, .alpha = 8, .match = {"one", "two"}}), (std::vector<std::string>{"one", "two"}));
  EXPECT_TRUE(net->forward(x).equal(before));  // B begins with zeros

  auto parameters = net->named_parameters();
  for (const auto& item : parameters)
    EXPECT_EQ(item.value().requires_grad(), item.key().find(".adapter.") != std::string::npos) << item.key();
  EXPECT_EQ(parameters["two.adapter.a"].sizes(), (std::vector<std::int64_t>{2, 7}));
  EXPECT_EQ(parameters["two.adapter.b"].sizes(), (std::vector<std::int64_t>{6, 2}));

  // The same function of plain torch.
  std::vector<Tensor> plain;
  for (const char* name : {"one.adapter.a", "one.adapter.b", "two.adapter.a", "two.adapter.b"}) {
    if (parameters[name].size(1) == 2) parameters[name].detach().copy_(at::randn_like(parameters[name]));
    plain.push_back(parameters[name].detach().clone().requires_grad_());
  }
  const auto weight = [&](const char* name, std::size_t at) {
    return parameters[std::string(name) + ".weight"].detach() + 4 * plain[at + 1].mm(plain[at]);
  };
  const Tensor expected = at::linear(
      at::gelu(at::linear(at::tanh(at::linear(x, weight("one", 0), parameters["one.bias"].detach())), weight("two", 2))),
      parameters["last.weight"].detach(), parameters["last.bias"].detach());
  const Tensor seen = net->forward(x);
  EXPECT_TRUE(at::allclose(seen, expected, 1e-12, 1e-14));
  seen.square().sum().backward();
  expected.square().sum().backward();
  std::size_t at = 0;
  for (const char* name : {"one.adapter.a", "one.adapter.b", "two.adapter.a", "two.adapter.b"}) {
    const Tensor gradient = parameters[name].grad(), right = plain[at++].grad();
    EXPECT_LT((gradient - right).norm().item<double>(), 1e-12 * right.norm().item<double>()) << name;
  }
  EXPECT_FALSE(parameters["one.weight"].grad().defined());

  // The merged layer is the adapted one.
  const Tensor merged = at::linear(x, net->one->merged_weight(), net->one->bias);
  EXPECT_TRUE(at::allclose(net->one->forward(x), merged, 1e-12, 1e-14));
}

TEST(AdaptableLinear, IsFoundInSequences) {
  torch::nn::Sequential net(AdaptableLinear(4, 4), torch::nn::ReLU(), AdaptableLinear(4, 3));
  EXPECT_EQ(add_adapters(*net, {.rank = 1}), (std::vector<std::string>{"0", "2"}));
  EXPECT_EQ(net->forward(at::ones({2, 4})).sizes(), (std::vector<std::int64_t>{2, 3}));
}

TEST(AdaptableLinear, WhatCannotBeIsRefused) {
  Net net = made(3);
  const auto refusal = [&](const AdapterOptions& options) {
    return thrown<ConfigError>([&] { add_adapters(*net, options); });
  };
  EXPECT_EQ(refusal({.match = {"three"}}), "\"three\" names no layer that can be adapted; allowed: one | two");
  EXPECT_EQ(refusal({.rank = 0}), "the rank of an adapter is 0; it must be at least 1");
  EXPECT_NE(refusal({.dropout = 0.1}).find("without a state"), std::string::npos);
  torch::nn::Linear plain(2, 2);
  EXPECT_NE(thrown<ConfigError>([&] { add_adapters(*plain, {}); }).find("in place of torch::nn::Linear"), std::string::npos);
  for (const auto& parameter : net->parameters()) EXPECT_TRUE(parameter.requires_grad());  // nothing was changed
}

}  // namespace
}  // namespace bonfire::adaptable_test
