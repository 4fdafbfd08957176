#include "bonfire/plan/placement.h"

#include <cmath>
#include <map>
#include <mutex>
#include <string>

#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <torch/nn/module.h>

#include "bonfire/comm/data_groups.h"
#include "bonfire/nn/unit.h"
#include "bonfire/optim/clip.h"
#include "bonfire/optim/optimizer.h"
#include "bonfire/shard/engine.h"
#include "tests/support/ranks.h"
#include "tests/support/saved_slices.h"

// Modules that are a part of a model: split weights beside whole ones.
namespace bonfire::placement_test {
namespace {

using testing::run_ranks;
using testing::SavedSlices;

constexpr std::int64_t rows = 6, columns = 5;

at::Tensor whole_weight() { return at::arange(rows * columns, at::kDouble).view({rows, columns}) / 10; }
at::Tensor whole_bias() { return at::arange(columns, at::kDouble) + 100; }

// Half of the rows of a matrix, and all of a vector.
struct HalfImpl : torch::nn::Module {
  explicit HalfImpl(std::int64_t half)
      : bias(register_parameter("bias", whole_bias())),
        weight(register_parameter("weight", whole_weight().narrow(0, half * rows / 2, rows / 2).clone())) {}
  at::Tensor forward(const at::Tensor& input) { return (weight * input).sum() + (bias * whole_weight()[0]).sum(); }
  at::Tensor bias, weight;
};
BONFIRE_UNIT(Half);

plan::Placement placement_of(std::int64_t half, const std::string& name) {
  if (name == "weight")
    return {.name = "layer.weight",
            .shape = {rows, columns},
            .boxes = {Box{{half * rows / 2, 0}, {(half + 1) * rows / 2, columns}}}};
  // Both halves hold all of it.
  return {.name = "layer.bias", .copy = static_cast<int>(half)};
}

// Ranks 0 and 1 train the first half of the model, 2 and 3 the second.
TEST(Placement, SplitAndWholeWeightsShareABufferAndCountOnce) {
  for (const auto what : {Sharded::none, Sharded::optimizer, Sharded::parameters}) {
    SCOPED_TRACE(plan::name_of(what));
    SavedSlices saved;
    std::mutex mutex;
    double squares = 0;
    run_ranks(4, [&](World& world) {
      const int half = world.rank() / 2;
      const MeshShape shape = what == Sharded::none ? MeshShape{.replicate = 2} : MeshShape{.shard = 2};
      const Mesh mesh = world.mesh(shape, half == 0 ? std::vector<int>{0, 1} : std::vector<int>{2, 3});
      Half module(half);
      Engine engine = shard(mesh, module, {.what = what, .placement = [half](const std::string& name, const at::Tensor&) {
                                             return placement_of(half, name);
                                           }});
      const auto& layout = engine.flats().front()->layout();
      ASSERT_EQ(engine.flats().size(), 1u);
      ASSERT_EQ(layout.regions.size(), 2u);
      for (const auto& segment : layout.segments) EXPECT_EQ(layout.regions[segment.region].split, segment.name == "weight");
      AdamW optimizer(engine, {.lr = 0.01, .weight_decay = 0});
      const auto input = whole_weight().narrow(0, half * rows / 2, rows / 2);
      engine.backward(module(input));
      {
        const double mine = local_squares(engine).item<double>();
        const std::lock_guard lock(mutex);
        squares += what == Sharded::none ? mine / 2 : mine;
      }
      optimizer.step();
      auto slices = optimizer.slices();
      // How many steps were taken in all is a number of neither half's.
      std::erase_if(slices, [](const Slice& slice) { return slice.name.empty(); });
      saved.add(engine.slices());
      saved.add(slices);
      world.group().barrier().wait();
      saved.check(engine.slices());
      saved.check(slices);
    });
    // Of the weight, its input; of the bias, in the half that counts it, the first row.
    const double expected = whole_weight().square().sum().item<double>() + whole_weight()[0].square().sum().item<double>();
    EXPECT_NEAR(squares, expected, 1e-12 * expected);
    const auto weight = saved.at("layer.weight", "value");
    EXPECT_EQ(weight.sizes(), (std::vector<std::int64_t>{rows, columns}));
    // The first step of Adam goes against the sign of a gradient by the rate.
    const auto moved = whole_weight() - 0.01 * whole_weight().sign();
    EXPECT_LT((weight - moved).abs().max().item<double>(), 1e-5);
    EXPECT_EQ(saved.at("layer.weight", "exp_avg").sizes(), weight.sizes());
  }
}

}  // namespace
}  // namespace bonfire::placement_test
