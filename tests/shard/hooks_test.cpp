#include <memory>
#include <utility>

#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include "bonfire/nn/unit.h"
#include "tests/shard/twins.h"

// Hooks of others on Units of an engine: they lie inside of the engine's, so that parameters are there whenever they run
// forward.
namespace bonfire::testing::hooks_test {
namespace {

// The backward of a Unit whose forward left no graph: runs it again.
class RunAgain final : public torch::autograd::Node {
 public:
  RunAgain(std::unique_ptr<RepeatableCall> call, std::vector<at::Tensor> inputs)
      : call_(std::move(call)), inputs_(std::move(inputs)) {}

  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    const at::AutoGradMode differentiate(true);
    std::vector<at::Tensor> leaves;
    for (const auto& input : inputs_) leaves.push_back(input.detach().set_requires_grad(input.requires_grad()));
    torch::autograd::backward(call_->run(leaves), std::move(gradients));
    torch::autograd::variable_list of_inputs;
    for (const auto& leaf : leaves)
      if (leaf.requires_grad()) of_inputs.push_back(leaf.grad());
    return of_inputs;
  }

 private:
  std::unique_ptr<RepeatableCall> call_;
  std::vector<at::Tensor> inputs_;
};

struct Recompute : UnitHook {
  std::vector<at::Tensor> around(UnitCall& call, std::vector<at::Tensor> inputs) override {
    auto again = call.repeatable();
    std::vector<at::Tensor> outputs;
    {
      const at::NoGradGuard no_grad;
      outputs = call.run(inputs);
    }
    torch::autograd::edge_list edges;
    for (const auto& input : inputs)
      if (input.requires_grad()) edges.push_back(torch::autograd::impl::gradient_edge(input));
    std::shared_ptr<RunAgain> node(new RunAgain(std::move(again), std::move(inputs)), torch::autograd::deleteNode);
    node->set_next_edges(std::move(edges));
    for (auto& output : outputs) torch::autograd::set_history(output, node);
    return outputs;
  }
};

TEST(Hooks, AUnitIsRunAgainInBackwardWithItsParametersThere) {
  run_ranks(sharding_ranks, [](World& world) {
    for (const Sharding& sharding : shardings()) {
      SCOPED_TRACE(sharding.name());
      Recompute recompute;
      Twins<Chain> twins(world, sharding, [] { return Chain(3); });
      int units = 0;
      for (const auto& module : twins.ours->modules(/*include_self=*/false))
        if (UnitSeam* const unit = unit_of(*module)) unit->hooks().add(recompute), ++units;
      ASSERT_EQ(units, 3);
      for (int step = 0; step < 3; ++step)
        twins.step([&](Chain& net, int rank) {
          return net->forward(chain_input(rank, step).set_requires_grad(true), {0, 1, 2}).pow(2).mean();
        });
      twins.expect_equal();
    }
  });
}

}  // namespace
}  // namespace bonfire::testing::hooks_test
