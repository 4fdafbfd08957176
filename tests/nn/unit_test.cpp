#include "bonfire/nn/unit.h"

#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <torch/nn/modules/container/sequential.h>

namespace bonfire {
namespace {

using at::Tensor;

// Counts the copies that are made of it.
struct Counted {
  int* copies;
  explicit Counted(int* count) : copies(count) {}
  Counted(const Counted& other) : copies(other.copies) { ++*copies; }
  Counted(Counted&& other) = default;
};

struct BlockImpl : torch::nn::Module {
  BlockImpl() { weight = register_parameter("weight", at::ones({1})); }
  Tensor forward(Tensor x) { return x * weight; }
  Tensor weight;
};
BONFIRE_UNIT(Block);

struct ManyImpl : torch::nn::Module {
  std::tuple<Tensor, std::vector<Tensor>> forward(const Tensor& a, std::optional<Tensor> b, const std::vector<Tensor>& c,
                                                  int n, Counted counted, std::unique_ptr<int> owned) const {
    return {a, {b.value_or(a), c.at(0) * n * *owned}};
  }
};
BONFIRE_UNIT(Many);

struct Recorder : UnitHooks {
  void before_forward(UnitSeam& unit, const std::vector<Tensor>& inputs) override {
    before.push_back(&unit.module());
    input_count = inputs.size();
  }
  void after_forward(UnitSeam& unit, const std::vector<Tensor>& outputs) override {
    after.push_back(&unit.module());
    output_count = outputs.size();
  }
  std::vector<torch::nn::Module*> before, after;
  std::size_t input_count = 0, output_count = 0;
};

TEST(Unit, EveryWayToCallForwardPassesTheSeam) {
  Recorder recorder;
  Block block;
  block->set_hooks(&recorder);
  torch::nn::Sequential sequence(block);
  const Tensor x = at::ones({2});
  block->forward(x);
  block(x);
  sequence->forward(x);
  EXPECT_EQ(recorder.before, std::vector<torch::nn::Module*>(3, block.get()));
  EXPECT_EQ(recorder.after, recorder.before);
  block->set_hooks(nullptr);
  block->forward(x);
  EXPECT_EQ(recorder.before.size(), 3U);
}

TEST(Unit, TensorsOfAllArgumentsAndResultsAreSeen) {
  Recorder recorder;
  Many many;
  int copies = 0;
  const Tensor x = at::ones({2});
  many->set_hooks(&recorder);
  many->forward(x, x, {x, x, Tensor()}, 3, Counted(&copies), std::make_unique<int>(2));
  EXPECT_EQ(recorder.input_count, 4U);
  EXPECT_EQ(recorder.output_count, 3U);
  EXPECT_EQ(copies, 0) << "an argument passed by value was copied on its way";
}

TEST(Unit, IsFoundFromItsModuleAndKeepsItsNames) {
  Block block;
  torch::nn::Module& module = *block;
  EXPECT_EQ(unit_of(module), static_cast<UnitSeam*>(block.get()));
  EXPECT_EQ(&unit_of(module)->module(), &module);
  EXPECT_EQ(module.named_parameters().keys(), std::vector<std::string>{"weight"});
  torch::nn::Sequential plain;
  EXPECT_EQ(unit_of(*plain), nullptr);
}

TEST(Unit, CloneIsRefusedBecauseItWouldLoseTheSeam) {
  Block block;
  const torch::nn::Module& module = *block;
  EXPECT_ANY_THROW(module.clone());
}

}  // namespace
}  // namespace bonfire
