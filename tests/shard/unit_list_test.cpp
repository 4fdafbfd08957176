// Units that are not declared by BONFIRE_UNIT, and lists of them, are gathered and freed like others.
#include <gtest/gtest.h>

#include <set>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <torch/nn/modules/transformerlayer.h>

#include "bonfire/nn/unit_list.h"
#include "bonfire/optim/optimizer.h"
#include "bonfire/shard/engine.h"
#include "tests/support/ranks.h"

namespace bonfire::unit_list_test {
namespace {

using testing::run_ranks;

constexpr std::int64_t width = 8;

// torch's own layer, marked or not, in fp64 and with the same values.
template <class Layer>
Layer layer_of(int number) {
  Layer layer(torch::nn::TransformerEncoderLayerOptions(width, 2).dim_feedforward(12).dropout(0));
  layer->to(at::kDouble);
  const at::NoGradGuard no_grad;
  double shift = 10 * number;
  for (auto& parameter : layer->parameters())
    parameter.copy_(at::arange(parameter.numel(), at::kDouble).add(shift += 1).sin().mul(0.3).view(parameter.sizes()));
  return layer;
}

using Foreign = UnitOf<torch::nn::TransformerEncoderLayerImpl>;
struct ListedImpl : torch::nn::Module {
  ListedImpl() {
    for (int at = 0; at < 3; ++at) layers->push_back(layer_of<Foreign>(at));
    register_module("layers", layers);
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& layer : *layers) x = layer->forward(x, /*src_mask=*/{}, /*src_key_padding_mask=*/{});
    return x;
  }
  UnitList<Foreign> layers;
};
BONFIRE_UNIT(Listed);

at::Tensor loss_of(const at::Tensor& out) { return out.pow(2).mean(); }
at::Tensor input(int step) { return at::arange(4 * 2 * width, at::kDouble).add(step).cos().view({4, 2, width}); }

TEST(UnitList, TrainsForeignLayersShardedAsOneRankDoes) {
  run_ranks(2, [&](World& world) {
    Listed ours;
    std::vector<torch::nn::TransformerEncoderLayer> plain;
    std::vector<at::Tensor> expected;
    for (int at = 0; at < 3; ++at) {
      plain.push_back(layer_of<torch::nn::TransformerEncoderLayer>(at));
      for (auto& parameter : plain.back()->parameters()) expected.push_back(parameter);
    }
    Engine engine = shard(world.mesh({.shard = 2}), ours, {.what = Sharded::parameters});
    // A buffer for each layer: nothing else has parameters.
    EXPECT_EQ(engine.flats().size(), 3U);
    std::set<std::string> names;
    for (const auto& flat : engine.flats())
      for (const auto& segment : flat->layout().segments) names.insert(segment.name);
    EXPECT_TRUE(names.contains("layers.2.linear1.weight")) << *names.begin();
    Sgd sgd(engine, {.lr = 0.1});
    for (int step = 0; step < 2; ++step) {
      const auto loss = loss_of(ours->forward(input(step)));
      engine.backward(loss);
      sgd.step();
      auto x = input(step);
      for (auto& layer : plain) x = layer->forward(x);
      const auto other = loss_of(x);
      EXPECT_NEAR(loss.item<double>(), other.item<double>(), 1e-12);
      other.backward();
      const at::NoGradGuard no_grad;
      for (auto& parameter : expected) {
        parameter.sub_(parameter.grad() * 0.1);
        parameter.mutable_grad().reset();
      }
    }
    const auto whole = engine.full_parameters();
    const auto mine = ours->parameters();
    ASSERT_EQ(mine.size(), expected.size());
    for (std::size_t at = 0; at < mine.size(); ++at)
      EXPECT_LT((mine[at] - expected[at]).abs().max().item<double>(), 1e-12) << at;
  });
}

}  // namespace
}  // namespace bonfire::unit_list_test
