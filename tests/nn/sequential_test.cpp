#include "bonfire/nn/sequential.h"

#include <sstream>

#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/linear.h>
#include <torch/serialize/input-archive.h>
#include <torch/serialize/output-archive.h>

namespace bonfire::sequential_test {
namespace {

using at::Tensor;
using torch::nn::Linear;
using torch::nn::ReLU;

struct MarkedImpl : torch::nn::Module {
  MarkedImpl() { weight = register_parameter("weight", at::ones({1})); }
  Tensor forward(Tensor x) { return x * weight; }
  Tensor weight;
};
BONFIRE_UNIT(Marked);

struct TwoInputsImpl : torch::nn::Module {
  TwoInputsImpl() { register_parameter("weight", at::ones({1})); }
  Tensor forward(Tensor x, Tensor y) { return x + y; }
};
TORCH_MODULE(TwoInputs);

struct CounterImpl : torch::nn::Module {
  CounterImpl() { register_parameter("weight", at::ones({1})); }
  Tensor forward(int n) { return at::full({1}, n); }
};
TORCH_MODULE(Counter);

struct PairMakerImpl : torch::nn::Module {
  PairMakerImpl() { register_parameter("weight", at::ones({1})); }
  std::pair<Tensor, Tensor> forward(Tensor x) { return {x, x}; }
};
TORCH_MODULE(PairMaker);

struct Recorder : UnitHook {
  void before_forward(UnitSeam& unit, std::vector<Tensor>& inputs) override {
    order.push_back(&unit.module());
    inputs.at(0) = inputs.at(0) + shift;
  }
  void after_forward(UnitSeam&, std::vector<Tensor>& outputs) override { EXPECT_EQ(outputs.size(), 1U); }
  std::vector<torch::nn::Module*> order;
  double shift = 0;
};

std::string message_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "nothing was thrown";
}

TEST(Sequential, PlainChildrenBecomeUnits) {
  Linear first(3, 4), last(4, 2);
  Marked marked;
  torch::nn::Sequential sequence({{"first", first}, {"relu", ReLU()}, {"marked", marked}, {"last", last}});
  const auto names = sequence->named_parameters().keys();
  const auto parameters = sequence->parameters();
  const Tensor x = at::randn({5, 3});
  const Tensor expected = sequence->forward(x);

  EXPECT_EQ(wrap_children(sequence), 2);
  EXPECT_EQ(wrap_children(sequence), 0) << "wrapped twice";
  EXPECT_EQ(sequence->named_parameters().keys(), names);
  for (std::size_t at = 0; at < parameters.size(); ++at) EXPECT_TRUE(sequence->parameters()[at].is_same(parameters[at]));
  EXPECT_TRUE(sequence->forward(x).equal(expected));

  Recorder recorder;
  const std::vector<torch::nn::Module*> units{first.get(), marked.get(), last.get()};
  for (torch::nn::Module* child : units) {
    UnitSeam* const unit = unit_of(*child, *sequence);
    ASSERT_TRUE(unit);
    EXPECT_EQ(&unit->module(), child);
    unit->hooks().add(recorder);
  }
  EXPECT_EQ(unit_of(*sequence->named_children()["relu"], *sequence), nullptr);
  EXPECT_EQ(unit_of(*first, *sequence)->type_name(), "Linear");
  EXPECT_TRUE(sequence->forward(x).equal(expected));
  EXPECT_EQ(recorder.order, units);

  recorder.shift = 1;
  EXPECT_TRUE(sequence->forward(x).equal(last(marked->weight * (ReLU()(first(x + 1)) + 1) + 1)));
  sequence->eval();
  EXPECT_FALSE(first->is_training());
}

TEST(Sequential, PredicateChoosesTheChildren) {
  torch::nn::Sequential sequence(Linear(2, 2), Linear(2, 2), Linear(2, 2));
  EXPECT_EQ(wrap_children(sequence, [](const std::string& name, torch::nn::Module&) { return name == "1"; }), 1);
  const auto children = sequence->children();
  EXPECT_EQ(unit_of(*children[0], *sequence), nullptr);
  EXPECT_TRUE(unit_of(*children[1], *sequence));
  EXPECT_EQ(unit_of(*children[2], *sequence), nullptr);
}

TEST(Sequential, ChildThatIsCalledTwiceIsOneUnit) {
  Linear shared(2, 2);
  torch::nn::Sequential sequence(shared, ReLU(), shared);
  EXPECT_EQ(wrap_children(sequence), 1);
  Recorder recorder;
  unit_of(*shared, *sequence)->hooks().add(recorder);
  sequence->forward(at::ones({1, 2}));
  EXPECT_EQ(recorder.order, std::vector<torch::nn::Module*>(2, shared.get()));
}

// What goes through the list of children finds the children themselves.
TEST(Sequential, WrappedChildrenAreReachedAsBefore) {
  torch::nn::Sequential sequence(Linear(2, 3), ReLU(), Linear(3, 2)), plain(Linear(2, 3), ReLU(), Linear(3, 2));
  wrap_children(sequence);
  int linears = 0;
  sequence->apply([&](torch::nn::Module& module) { linears += module.as<Linear>() != nullptr; });
  EXPECT_EQ(linears, 2);
  sequence->to(at::kDouble);
  plain->to(at::kDouble);
  const Tensor x = at::randn({4, 2}, at::kDouble);

  std::stringstream file;
  torch::serialize::OutputArchive saved;
  sequence->save(saved);
  saved.save_to(file);
  torch::serialize::InputArchive loaded;
  loaded.load_from(file);
  plain->load(loaded);
  EXPECT_TRUE(sequence->forward(x).equal(plain->forward(x)));
}

TEST(Sequential, SeamsAnnounceThemselves) {
  struct Registrar : UnitObserver {
    void constructed(UnitSeam& unit) override { modules.push_back(&unit.module()); }
    std::vector<torch::nn::Module*> modules;
  } registrar;
  Linear linear(2, 2);
  torch::nn::Sequential sequence(linear);
  const ObserveUnits observe(registrar);
  wrap_children(sequence);
  EXPECT_EQ(registrar.modules, std::vector<torch::nn::Module*>{linear.get()});
}

TEST(Sequential, OtherChildrenAreRefusedByNameAndNothingIsWrapped) {
  torch::nn::Sequential two({{"plain", Linear(2, 2)}, {"two", TwoInputs()}});
  EXPECT_EQ(message_of([&] { wrap_children(two); }),
            "child 'two' (TwoInputs) of a Sequential cannot be wrapped: its forward takes something else than one tensor");
  EXPECT_EQ(unit_of(*two->children()[0], *two), nullptr);
  torch::nn::Sequential counter(Counter{});
  EXPECT_EQ(message_of([&] { wrap_children(counter); }),
            "child '0' (Counter) of a Sequential cannot be wrapped: its forward takes something else than one tensor");
  torch::nn::Sequential pair(PairMaker{});
  EXPECT_EQ(wrap_children(pair), 1);
  EXPECT_EQ(
      message_of([&] { (pair->forward<std::pair<Tensor, Tensor>>(at::ones({1}))); }),
      "child '0' (PairMaker) of a Sequential is wrapped and returned std::pair<at::Tensor, at::Tensor>; allowed: a tensor");
  EXPECT_EQ(message_of([&] { pair->clone(); }),
            "child '0' (PairMaker) of a Sequential is a Unit and cannot be cloned; build it a second time");
}

TEST(Sequential, CanBeAUnitAsAWhole) {
  Linear first(3, 4);
  UnitSequential root({{"first", first}, {"relu", ReLU()}});
  Recorder recorder;
  ASSERT_TRUE(unit_of(*root));
  EXPECT_EQ(unit_of(*root)->type_name(), "UnitSequential");
  EXPECT_EQ(root->named_parameters().keys(), (std::vector<std::string>{"first.weight", "first.bias"}));
  root->hooks().add(recorder);
  EXPECT_EQ(wrap_children(*root), 1);
  unit_of(*first, *root)->hooks().add(recorder);
  const Tensor x = at::randn({2, 3});
  EXPECT_TRUE(root->forward(x).equal(first(x).relu()));
  EXPECT_EQ(recorder.order, (std::vector<torch::nn::Module*>{root.get(), first.get()}));

  UnitSequential unnamed(Linear(3, 4), ReLU());
  torch::nn::Sequential around(unnamed, Linear(4, 1));
  EXPECT_EQ(unit_of(*around->children()[0], *around), static_cast<UnitSeam*>(unnamed.get()));
  EXPECT_EQ(around->forward(x).sizes(), (std::vector<std::int64_t>{2, 1}));
}

// A user's own type over torch's Sequential.
struct NetworkImpl : torch::nn::SequentialImpl {
  using SequentialImpl::SequentialImpl;
  Tensor forward(Tensor x) { return SequentialImpl::forward(x).sum(); }
};
BONFIRE_UNIT(Network);

TEST(Sequential, UsersTypeOverItCanBeMarked) {
  Network network(Linear(3, 4), ReLU(), Linear(4, 4));
  EXPECT_EQ(wrap_children(*network), 2);
  Recorder recorder;
  network->hooks().add(recorder);
  EXPECT_EQ(network(at::ones({2, 3})).dim(), 0);
  EXPECT_EQ(recorder.order, std::vector<torch::nn::Module*>{network.get()});
}

}  // namespace
}  // namespace bonfire::sequential_test
