#include "bonfire/nn/unit.h"

#include <gtest/gtest.h>

#include <stdexcept>
#include <thread>

#include <ATen/ATen.h>
#include <torch/nn/modules/container/sequential.h>

namespace bonfire::unit_test {
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

struct Recorder : UnitHook {
  void before_forward(UnitSeam& unit, std::vector<Tensor>& inputs) override {
    before.push_back(&unit.module());
    input_count = inputs.size();
  }
  void after_forward(UnitSeam& unit, std::vector<Tensor>& outputs) override {
    after.push_back(&unit.module());
    output_count = outputs.size();
  }
  std::vector<torch::nn::Module*> before, after;
  std::size_t input_count = 0, output_count = 0;
};

TEST(Unit, EveryWayToCallForwardPassesTheSeam) {
  Recorder recorder;
  Block block;
  block->hooks().add(recorder);
  torch::nn::Sequential sequence(block);
  const Tensor x = at::ones({2});
  block->forward(x);
  block(x);
  sequence->forward(x);
  EXPECT_EQ(recorder.before, std::vector<torch::nn::Module*>(3, block.get()));
  EXPECT_EQ(recorder.after, recorder.before);
  block->hooks().remove(recorder);
  block->forward(x);
  EXPECT_EQ(recorder.before.size(), 3U);
}

TEST(Unit, TensorsOfAllArgumentsAndResultsAreSeen) {
  Recorder recorder;
  Many many;
  int copies = 0;
  const Tensor x = at::ones({2});
  many->hooks().add(recorder);
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

// Adds one to every input and ten to every output.
struct Adder : UnitHook {
  void before_forward(UnitSeam&, std::vector<Tensor>& inputs) override {
    for (auto& input : inputs) input = input + 1;
  }
  void after_forward(UnitSeam&, std::vector<Tensor>& outputs) override {
    for (auto& output : outputs) output = output + 10;
  }
  void forward_failed(UnitSeam&) override {
    ++failed;
    try {
      std::rethrow_exception(std::current_exception());
    } catch (const std::exception& error) {
      what = error.what();
    }
  }
  int failed = 0;
  std::string what;
};

Tensor number(double value) { return at::full({}, value); }
double value(const Tensor& tensor) { return tensor.item<double>(); }

using Nested = std::tuple<int, std::pair<Tensor, std::vector<std::optional<Tensor>>>, std::array<Tensor, 2>>;

struct ByReferenceImpl : torch::nn::Module {
  Tensor forward(const Tensor& x) { return x; }
};
BONFIRE_UNIT(ByReference);
struct ByValueImpl : torch::nn::Module {
  Tensor forward(Tensor x) { return x; }
};
BONFIRE_UNIT(ByValue);
struct OptionalImpl : torch::nn::Module {
  std::optional<Tensor> forward(std::optional<Tensor> x) { return x; }
};
BONFIRE_UNIT(Optional);
struct VectorImpl : torch::nn::Module {
  std::vector<Tensor> forward(const std::vector<Tensor>& x) { return x; }
};
BONFIRE_UNIT(Vector);
struct TreeImpl : torch::nn::Module {
  Nested forward(const Nested& x) { return x; }
};
BONFIRE_UNIT(Tree);
struct ConsumerImpl : torch::nn::Module {
  Tensor forward(Tensor&& x, bool consume) { return consume ? Tensor(std::move(x)) : x.clone(); }
};
BONFIRE_UNIT(Consumer);
struct WriterImpl : torch::nn::Module {
  Tensor forward(std::vector<Tensor>& x, Tensor& out, int& calls) {
    ++calls;
    out = x.at(0) * 100;
    x.push_back(number(7));
    return x.at(0);
  }
};
BONFIRE_UNIT(Writer);
struct MoveOnlyImpl : torch::nn::Module {
  std::pair<Tensor, std::unique_ptr<int>> forward(std::pair<Tensor, std::unique_ptr<int>> x, std::unique_ptr<int>&& y,
                                                  const std::pair<Tensor, std::unique_ptr<int>>& unseen) {
    *x.second += *std::unique_ptr<int>(std::move(y));
    return {x.first + unseen.first, std::move(x.second)};
  }
};
BONFIRE_UNIT(MoveOnly);

TEST(Unit, HooksReplaceTensorsWhereverTheyAre) {
  Adder adder;
  const auto hooked = [&](auto unit) {
    unit->hooks().add(adder);
    return unit;
  };
  const Tensor one = number(1);
  Tensor mine = one;
  EXPECT_EQ(value(hooked(ByReference())->forward(mine)), 12);
  EXPECT_EQ(value(hooked(ByValue())->forward(mine)), 12);
  EXPECT_EQ(value(*hooked(Optional())->forward(mine)), 12);
  EXPECT_FALSE(hooked(Optional())->forward(std::nullopt));

  const std::vector<Tensor> several{mine, Tensor(), number(2)};
  const auto back = hooked(Vector())->forward(several);
  EXPECT_EQ(value(back.at(0)), 12);
  EXPECT_FALSE(back.at(1).defined());
  EXPECT_EQ(value(back.at(2)), 13);
  EXPECT_EQ(value(several.at(2)), 2);

  const Nested nested{5, {mine, {std::nullopt, number(2)}}, {number(3), Tensor()}};
  const auto [n, pair, array] = hooked(Tree())->forward(nested);
  EXPECT_EQ(n, 5);
  EXPECT_EQ(value(pair.first), 12);
  EXPECT_EQ(value(*pair.second.at(1)), 13);
  EXPECT_EQ(value(array[0]), 14);
  EXPECT_FALSE(array[1].defined());

  auto owner = std::make_pair(number(1), std::make_unique<int>(1));
  const auto moved = hooked(MoveOnly())->forward({number(1), std::make_unique<int>(2)}, std::make_unique<int>(3), owner);
  EXPECT_EQ(value(moved.first), 2 + 1 + 10);
  EXPECT_EQ(*moved.second, 5);
  EXPECT_TRUE(mine.is_same(one));
}

TEST(Unit, VariablesOfTheCallerChangeAsForwardChangesThemAndNotOtherwise) {
  Adder adder;
  for (UnitHook* hooks : {static_cast<UnitHook*>(nullptr), static_cast<UnitHook*>(&adder)}) {
    SCOPED_TRACE(hooks ? "with hooks" : "without");
    Consumer consumer;
    if (hooks) consumer->hooks().add(*hooks);
    const Tensor one = number(1);
    Tensor mine = one;
    consumer->forward(std::move(mine), false);
    EXPECT_TRUE(mine.is_same(one));
    consumer->forward(std::move(mine), true);
    EXPECT_FALSE(mine.defined());

    Writer writer;
    if (hooks) writer->hooks().add(*hooks);
    std::vector<Tensor> several{one};
    Tensor out;
    int calls = 0;
    EXPECT_EQ(value(writer->forward(several, out, calls)), hooks ? 12 : 1);
    EXPECT_EQ(calls, 1);
    EXPECT_EQ(value(out), hooks ? 200 : 100);
    ASSERT_EQ(several.size(), 2U);
    EXPECT_TRUE(several[0].is_same(one));
    EXPECT_EQ(value(several[1]), 7);
  }
}

TEST(Unit, InputsPassedByValueDieWhenForwardDropsThem) {
  struct Watch : UnitHook {
    void before_forward(UnitSeam&, std::vector<Tensor>& inputs) override { input = inputs.at(0).getIntrusivePtr(); }
    void after_forward(UnitSeam&, std::vector<Tensor>&) override { EXPECT_TRUE(input.expired()); }
    c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> input{
        c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>()};
  } watch;
  struct DropImpl : torch::nn::Module {
    Tensor forward(Tensor x) { return x.mul(2); }
  };
  Unit<DropImpl> unit;
  unit.hooks().add(watch);
  unit.forward(number(1));
}

TEST(Unit, HooksMayNotAddOrRemoveTensors) {
  struct Greedy : Recorder {
    void after_forward(UnitSeam&, std::vector<Tensor>& outputs) override { outputs.push_back(outputs[0]); }
  } greedy;
  Block block;
  block->hooks().add(greedy);
  try {
    block->forward(at::ones({2}));
    FAIL();
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(),
                 "the hooks of Unit Block were given 1 tensors and gave back 2: replace tensors in their places");
  }
}

TEST(Unit, HooksHearOfAForwardThatThrew) {
  struct ThrowingImpl : torch::nn::Module {
    Tensor forward(Tensor& x) {
      x = number(3);
      throw std::domain_error("no such token");
    }
  };
  Adder adder;
  Unit<ThrowingImpl> unit;
  unit.hooks().add(adder);
  Tensor x = number(1);
  EXPECT_THROW(unit.forward(x), std::domain_error);
  EXPECT_EQ(adder.failed, 1);
  EXPECT_EQ(adder.what, "no such token");
  EXPECT_EQ(value(x), 3);
}

// Writes down when it is entered and left.
struct Logger : UnitHook {
  Logger(std::string name, std::vector<std::string>& log) : name(std::move(name)), log(log) {}
  void before_forward(UnitSeam&, std::vector<Tensor>& inputs) override {
    log.push_back("into " + name);
    for (auto& input : inputs) input = input * 2;
  }
  void after_forward(UnitSeam&, std::vector<Tensor>& outputs) override {
    log.push_back("out of " + name);
    for (auto& output : outputs) output = output + 1;
  }
  std::string name;
  std::vector<std::string>& log;
};

TEST(Unit, HooksLieInsideEachOtherInTheOrderInWhichTheyWereAdded) {
  std::vector<std::string> log;
  Logger outer("outer", log), inner("inner", log);
  ByValue unit;
  unit->hooks().add(outer);
  unit->hooks().add(inner);
  EXPECT_EQ(value(unit->forward(number(3))), 3 * 2 * 2 + 1 + 1);
  EXPECT_EQ(log, (std::vector<std::string>{"into outer", "into inner", "out of inner", "out of outer"}));
  unit->hooks().remove(outer);
  log.clear();
  EXPECT_EQ(value(unit->forward(number(3))), 3 * 2 + 1);
  EXPECT_EQ(log, (std::vector<std::string>{"into inner", "out of inner"}));
  unit->hooks().remove(inner);
  EXPECT_TRUE(unit->hooks().empty());
}

// Runs what is inside of it a second time, as recomputation does: the first time without a graph.
struct Twice : UnitHook {
  std::vector<Tensor> around(UnitCall& call, std::vector<Tensor> inputs) override {
    again = call.repeatable();
    {
      const at::NoGradGuard no_grad;
      first = again->run(inputs);
    }
    kept = inputs;
    return call.run(std::move(inputs));
  }
  std::vector<Tensor> first, kept;
  std::unique_ptr<RepeatableCall> again;
};

struct ScaledImpl : torch::nn::Module {
  ScaledImpl() : weight(register_parameter("weight", at::full({}, 5.0))) {}
  std::pair<Tensor, std::vector<Tensor>> forward(Tensor x, const std::vector<std::optional<Tensor>>& more, int times,
                                                 std::string name, bool& called) {
    ++runs;
    called = true;
    EXPECT_EQ(name, "a name that is too long for the string itself");
    Tensor sum = x * weight * times;
    for (const auto& one : more)
      if (one) sum = sum + *one;
    return {sum, {x}};
  }
  Tensor weight;
  int runs = 0;
};
BONFIRE_UNIT(Scaled);

TEST(Unit, AHookRunsForwardAgain) {
  Twice twice;
  std::vector<std::string> log;
  Logger inside("inside", log);
  Scaled unit;
  unit->hooks().add(twice);
  unit->hooks().add(inside);
  bool called = false;
  {
    const Tensor x = number(3).set_requires_grad(true);
    const auto [sum, rest] =
        unit->forward(x, {std::nullopt, number(10)}, 2, "a name that is too long for the string itself", called);
    // Inputs are doubled by the hook inside, and one is added to what comes out of it.
    EXPECT_EQ(value(sum), 6 * 5 * 2 + 20 + 1);
    EXPECT_EQ(value(rest.at(0)), 7);
    sum.backward();
    EXPECT_EQ(value(x.grad()), 20);
    EXPECT_EQ(value(unit->weight.grad()), 12);
  }
  EXPECT_TRUE(called);
  EXPECT_EQ(unit->runs, 2);
  ASSERT_EQ(twice.first.size(), 2U);
  EXPECT_EQ(value(twice.first[0]), 81);
  EXPECT_FALSE(twice.first[0].requires_grad());
  EXPECT_EQ(log.size(), 4U);

  // Also when the call has long returned, with other inputs, as often as one likes.
  for (int again = 0; again < 2; ++again) {
    const auto outputs = twice.again->run({number(1), number(0)});
    EXPECT_EQ(value(outputs.at(0)), 2 * 5 * 2 + 1);
    EXPECT_TRUE(outputs.at(0).requires_grad());
  }
  EXPECT_EQ(unit->runs, 4);
}

TEST(Unit, HooksRunACallOnceAndWhatCannotBeKeptOnce) {
  const auto message = [](const auto& run) -> std::string {
    try {
      run();
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  struct Greedy : UnitHook {
    std::vector<Tensor> around(UnitCall& call, std::vector<Tensor> inputs) override {
      call.run(inputs);
      return call.run(inputs);
    }
  } greedy;
  ByValue unit;
  unit->hooks().add(greedy);
  EXPECT_EQ(message([&] { unit->forward(number(1)); }), "a hook of Unit ByValue ran it twice: use UnitCall::repeatable");
  struct Lazy : UnitHook {
    std::vector<Tensor> around(UnitCall&, std::vector<Tensor> inputs) override { return inputs; }
  } lazy;
  ByReference other;
  other->hooks().add(lazy);
  EXPECT_EQ(message([&] { other->forward(number(1)); }), "a hook of Unit ByReference returned without running it");
  Twice twice;
  MoveOnly move_only;
  move_only->hooks().add(twice);
  EXPECT_EQ(message([&] {
              move_only->forward({number(1), std::make_unique<int>(2)}, std::make_unique<int>(3),
                                 {number(1), std::make_unique<int>(1)});
            }).substr(0, 66),
            "the forward of Unit MoveOnly cannot be run again: it takes a std::");
}

TEST(Unit, NameOfItsTypeIsTheOneTheUserWrote) {
  struct LocalImpl : torch::nn::Module {
    Tensor forward(Tensor x) { return x; }
  };
  EXPECT_EQ(Block()->type_name(), "Block");
  EXPECT_EQ(Unit<LocalImpl>().type_name(), "Local");
}

// A Unit with Units inside, some of which its constructor makes.
struct TowerImpl : torch::nn::Module {
  explicit TowerImpl(bool fails) {
    first = register_module("first", Block());
    second = register_module("second", Block());
    if (fails) throw std::domain_error("too high");
  }
  Tensor forward(Tensor x) { return second(first(x)); }
  Block first{nullptr}, second{nullptr};
};
BONFIRE_UNIT(Tower);

struct Registrar : UnitObserver {
  void constructed(UnitSeam& unit) override {
    names.push_back(unit.type_name() + " with " + std::to_string(unit.module().parameters().size()));
    EXPECT_EQ(unit_of(unit.module()), &unit);
    unit.set_prepared(std::make_shared<std::string>("ready"));
  }
  std::vector<std::string> names;
};

TEST(Unit, AnnouncesItselfOnceItIsComplete) {
  Registrar registrar, inner;
  Block before;
  Tower tower{nullptr};
  {
    const ObserveUnits observe(registrar);
    tower = Tower(false);
    EXPECT_THROW(Tower(true), std::domain_error);  // its Blocks were complete, it never was
    {
      const ObserveUnits hides(inner);
      Block hidden;
    }
    std::thread([] { Block elsewhere; }).join();
    Block last;
  }
  Block after;
  EXPECT_EQ(registrar.names, (std::vector<std::string>{"Block with 1", "Block with 1", "Tower with 2", "Block with 1",
                                                       "Block with 1", "Block with 1"}));
  EXPECT_EQ(inner.names, std::vector<std::string>{"Block with 1"});
  EXPECT_EQ(*static_cast<std::string*>(tower->prepared().get()), "ready");
  EXPECT_FALSE(before->prepared() || after->prepared());
}

TEST(Unit, ObserverThatThrowsEndsTheConstruction) {
  struct Full : UnitObserver {
    void constructed(UnitSeam&) override { throw std::domain_error("full"); }
  } full;
  const ObserveUnits observe(full);
  EXPECT_THROW(Block(), std::domain_error);
}

TEST(Unit, CloneIsRefusedBecauseItWouldLoseTheSeam) {
  Block block;
  const torch::nn::Module& module = *block;
  EXPECT_ANY_THROW(module.clone());
  static_assert(!std::is_copy_constructible_v<Block::Impl>);
}

}  // namespace
}  // namespace bonfire::unit_test
