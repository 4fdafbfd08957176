// A recomputed forward has the gradients of an ordinary one, to the last bit, and keeps its inputs alone.
#include "bonfire/nn/recompute.h"

#include <gtest/gtest.h>

#include <functional>

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include "bonfire/nn/dropout_state.h"
#include "bonfire/nn/host_inputs.h"
#include "tests/support/rank_memory.h"
#include "tests/support/thrown.h"

namespace bonfire::recompute_test {
namespace {

using at::Tensor;
template <class Action>
std::string thrown(const Action& action) {
  return testing::thrown<std::exception>(action);
}

Tensor numbers(at::IntArrayRef shape) {
  return at::arange(c10::multiply_integers(shape), at::kFloat).mul(1.7).sin().view(shape);
}

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(std::int64_t width = 6)
      : up(register_module("up", torch::nn::Linear(width, 3 * width))),
        down(register_module("down", torch::nn::Linear(3 * width, width))) {
    const at::NoGradGuard no_grad;
    for (auto& parameter : parameters()) parameter.copy_(numbers(parameter.sizes()));
  }
  Tensor forward(const Tensor& x) {
    ++runs;
    return x + down(up(x).tanh());
  }
  int runs = 0;
  torch::nn::Linear up, down;
};
BONFIRE_UNIT(Block);

struct NetImpl : torch::nn::Module {
  Tensor forward(Tensor x) {
    for (auto& block : {first, second, third}) x = Block(block)->forward(x);
    return x;
  }
  Block first = register_module("first", Block()), second = register_module("second", Block()),
        third = register_module("third", Block());
};
BONFIRE_UNIT(Net);

std::vector<Tensor> gradients(torch::nn::Module& module) {
  std::vector<Tensor> all;
  for (auto& parameter : module.parameters()) {
    all.push_back(parameter.grad().clone());
    parameter.mutable_grad().reset();
  }
  return all;
}

void expect_same(const std::vector<Tensor>& some, const std::vector<Tensor>& others) {
  ASSERT_EQ(some.size(), others.size());
  for (std::size_t at = 0; at < some.size(); ++at) EXPECT_TRUE(at::equal(some[at], others[at])) << at;
}

TEST(Recompute, HasTheGradientsOfTheOrdinaryForward) {
  Block block;
  const Tensor x = numbers({4, 6}).requires_grad_();
  block->forward(x).square().sum().backward();
  auto expected = gradients(*block);
  expected.push_back(x.grad().clone());
  x.mutable_grad().reset();
  recompute(block, x).square().sum().backward();
  EXPECT_EQ(block->runs, 3);
  auto made = gradients(*block);
  made.push_back(x.grad());
  expect_same(made, expected);
}

TEST(Recompute, WithoutGradientsForwardSimplyRuns) {
  Block block;
  const at::NoGradGuard no_grad;
  EXPECT_FALSE(recompute(block, numbers({4, 6})).requires_grad());
  EXPECT_EQ(block->runs, 1);
}

TEST(Recompute, InputsNeedNoGradient) {
  torch::nn::Embedding embedding(10, 4);
  const Tensor tokens = at::arange(10).remainder(7);
  const auto loss = [](const Tensor& x) { return x.pow(3).sum(); };
  loss(embedding(tokens).tanh()).backward();
  const auto expected = gradients(*embedding);
  loss(recompute([embedding](const Tensor& t) mutable { return embedding(t).tanh(); }, tokens)).backward();
  expect_same(gradients(*embedding), expected);
}

TEST(Recompute, TakesAndReturnsContainers) {
  const auto forward = [](const Tensor& x, const std::vector<Tensor>& more, std::optional<Tensor> none, double factor) {
    return std::tuple(x * more.at(0).exp() * factor, std::vector<Tensor>{more.at(1).square(), none.value_or(x).sin()});
  };
  const auto run = [&](auto&& call) {
    const Tensor a = numbers({3}).requires_grad_(), b = numbers({3}).mul(2).requires_grad_(), c = numbers({3});
    const auto [first, rest] = call(a, std::vector<Tensor>{b, c}, std::optional<Tensor>(), 3.0);
    (first.sum() + rest[0].sum() + rest[1].sum()).backward();
    return std::vector<Tensor>{a.grad(), b.grad()};
  };
  expect_same(run([&](auto&&... x) { return recompute(forward, x...); }), run(forward));
}

TEST(Recompute, KeepsTheInputAlone) {
  Block block(64);
  testing::RankMemory memory;
  const Tensor x = at::ones({256, 64});
  const auto kept = [&](auto&& forward) {
    const auto before = memory.current();
    const Tensor loss = forward().sum();
    return memory.current() - before;
  };
  // The blocks' results are inputs of the next, but for the last, which the loss drops.
  const std::int64_t width = 256 * 64 * 4, small = 4096;
  EXPECT_GE(kept([&] { return block->forward(block->forward(x)); }), 7 * width);
  EXPECT_LE(kept([&] { return recompute(block, recompute(block, x)); }), width + small);
}

TEST(Recompute, MemoryOfASecondRunGoesWithItsBackward) {
  Block block(64);
  testing::RankMemory memory;
  const Tensor x = at::ones({256, 64});
  auto chain = [&](bool again) {
    Tensor y = x;
    for (int at = 0; at < 6; ++at) y = again ? recompute(block, y) : block->forward(y);
    return y.sum();
  };
  const std::int64_t width = 256 * 64 * 4;
  const auto peak = [&](bool again) {
    const auto before = memory.current();
    memory.peak();
    chain(again).backward();
    const auto most = memory.peak() - before;
    gradients(*block);
    return most;
  };
  // Six inputs, and one block's own with its backward's.
  EXPECT_LE(peak(true), 6 * width + 14 * width);
  EXPECT_GE(peak(false), 6 * 4 * width + width);
}

TEST(Recompute, RepeatsTorchsRandomNumbers) {
  torch::nn::Sequential net(torch::nn::Linear(8, 8), torch::nn::Dropout(0.5), torch::nn::Linear(8, 8),
                            torch::nn::Dropout(0.3));
  const Tensor x = numbers({16, 8});
  const auto run = [&](bool again) {
    at::manual_seed(7);
    Tensor y = again ? recompute([net](Tensor in) mutable { return net->forward(in); }, x) : net->forward(x);
    // What is drawn between forward and backward goes on from there.
    std::vector<Tensor> out{y.detach(), at::rand({3})};
    y.square().sum().backward();
    out.push_back(at::rand({3}));
    for (auto& gradient : gradients(*net)) out.push_back(gradient);
    return out;
  };
  expect_same(run(true), run(false));
}

TEST(Recompute, RepeatsOurDropout) {
  const auto state = std::make_shared<DropoutState>();
  const Dropout dropout(0.4, state, "place");
  const auto run = [&](bool again) {
    const Tensor x = numbers({16, 8}).requires_grad_();
    *state = {.seed = Random(3), .step = 5, .first_sample = 32};
    const auto forward = [&](const Tensor& in) { return dropout(in.sin()).square(); };
    const Tensor y = again ? recompute(forward, x) : forward(x);
    // The next microbatch, or an evaluation, comes before backward.
    state->first_sample = 48;
    state->training = false;
    y.sum().backward();
    EXPECT_EQ(state->first_sample, 48);
    EXPECT_FALSE(state->training);
    return std::vector<Tensor>{y.detach(), x.grad()};
  };
  expect_same(run(true), run(false));
}

TEST(Recompute, PutsBuffersBack) {
  torch::nn::BatchNorm1d norm(5);
  const auto run = [&](bool again) {
    for (auto& buffer : norm->buffers()) buffer.zero_();
    const Tensor x = numbers({6, 5}).requires_grad_();
    (again ? recompute(norm, x) : norm->forward(x)).square().sum().backward();
    std::vector<Tensor> out{x.grad()};
    for (auto& buffer : norm->buffers()) out.push_back(buffer.clone());
    return out;
  };
  expect_same(run(true), run(false));
}

TEST(Recompute, RunsAgainUnderTheSameAutocast) {
  Block block;
  const auto run = [&](bool again) {
    const Tensor x = numbers({4, 6}).requires_grad_();
    at::autocast::set_autocast_enabled(at::kCPU, true);
    at::autocast::increment_nesting();
    const Tensor y = again ? recompute(block, x) : block->forward(x);
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(at::kCPU, false);
    y.to(at::kFloat).square().sum().backward();
    EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
    auto all = gradients(*block);
    all.push_back(x.grad());
    return all;
  };
  expect_same(run(true), run(false));
}

TEST(Recompute, IsNested) {
  Net net;
  const auto run = [&](auto&& forward) {
    const Tensor x = numbers({4, 6}).requires_grad_();
    forward(x).square().sum().backward();
    auto all = gradients(*net);
    all.push_back(x.grad());
    return all;
  };
  const auto expected = run([&](const Tensor& x) { return net->forward(x); });
  const auto inner = [&](const Tensor& x) {
    return recompute(net->third,
                     recompute([&](const Tensor& y) { return recompute(net->second, recompute(net->first, y)); }, x));
  };
  expect_same(run(inner), expected);
  expect_same(run([&](const Tensor& x) { return recompute(inner, x); }), expected);
}

TEST(Recompute, IsNestedAndRepeatsDropout) {
  const auto state = std::make_shared<DropoutState>();
  const Dropout dropout(0.4, state, "place");
  const auto run = [&](int depth) {
    const Tensor x = numbers({16, 8}).requires_grad_();
    *state = {.seed = Random(3), .step = 5, .first_sample = 32};
    std::function<Tensor(const Tensor&)> forward = [&](const Tensor& in) { return dropout(in.sin()).square(); };
    for (int at = 0; at < depth; ++at)
      forward = [inner = forward](const Tensor& in) { return recompute(inner, in.cos()).exp(); };
    const Tensor y = depth == 0 ? dropout(x.cos().cos().sin()).square().exp().exp() : forward(x);
    state->first_sample = 48;
    state->training = false;
    y.sum().backward();
    return std::vector<Tensor>{y.detach(), x.grad()};
  };
  expect_same(run(2), run(0));
}

TEST(Recompute, ARetainedGraphKeepsWhatWasMadeAgain) {
  Block block;
  const auto run = [&](bool again) {
    const Tensor x = numbers({4, 6}).requires_grad_();
    const Tensor loss = (again ? recompute(block, x) : block->forward(x)).square().sum();
    loss.backward({}, /*retain_graph=*/true);
    loss.backward();
    auto all = gradients(*block);
    all.push_back(x.grad());
    return all;
  };
  expect_same(run(true), run(false));
}

// As on a device with memory of its own.
TEST(Recompute, KeepsInputsElsewhere) {
  Net net;
  const Tensor x = numbers({4, 6});
  const std::int64_t bytes = 4 * 6 * 4;
  const auto run = [&](int microbatches) {
    std::vector<Tensor> losses;
    for (int at = 0; at < microbatches; ++at) losses.push_back(net->forward(x + at).square().sum());
    for (const auto& loss : losses) loss.backward();
    return gradients(*net);
  };
  const auto expected = run(2);
  const auto host = std::make_shared<HostInputs>(HostInputs::Options{.from_host = true});
  const RecomputedUnits recomputed(net, {}, {.host = host});
  expect_same(run(2), expected);
  EXPECT_EQ(host->bytes_kept(), 0);
  EXPECT_EQ(host->bytes_moved(), 2 * 2 * 3 * bytes);
  {
    const Tensor dropped = net->forward(x);
    EXPECT_EQ(host->bytes_kept(), 3 * bytes);
  }
  EXPECT_EQ(host->bytes_kept(), 0);
  Tensor input = numbers({4, 6}).requires_grad_().mul(1);
  const Tensor y = net->first->forward(input);
  input.mul_(2);
  EXPECT_EQ(thrown([&] { y.sum().backward(); }),
            "input 0 of Unit 'first' was changed in place between its forward and the backward that runs it again");
  // Where nothing has to move, nothing does.
  const auto idle = std::make_shared<HostInputs>();
  recompute({.host = idle}, net->first, x).sum().backward();
  EXPECT_EQ(idle->bytes_moved(), 0);
}

TEST(Recompute, UnitsOfAModuleAreRecomputedWhileTheObjectLives) {
  Net net;
  const Tensor x = numbers({4, 6});
  const auto run = [&] {
    net->forward(x).square().sum().backward();
    return gradients(*net);
  };
  const auto expected = run();
  {
    const RecomputedUnits recomputed(
        net, [](const std::string& path, torch::nn::Module&) { return path != "first" && !path.empty(); });
    EXPECT_EQ(recomputed.count(), 2U);
    expect_same(run(), expected);
    EXPECT_EQ(net->first->runs, 2);
    EXPECT_EQ(net->second->runs, 3);
  }
  run();
  EXPECT_EQ(net->second->runs, 4);
  RecomputedUnits all(net);
  EXPECT_EQ(all.count(), 3U);
  all = RecomputedUnits(net, [](const std::string& path, torch::nn::Module&) { return path.empty(); });
  expect_same(run(), expected);
  EXPECT_EQ(net->first->runs, 5);
}

struct Order : UnitHook {
  Order(std::vector<int>& seen, int number) : seen(seen), number(number) {}
  void before_forward(UnitSeam&, std::vector<Tensor>&) override { seen.push_back(number); }
  std::vector<int>& seen;
  int number;
};

// A hook that is added later, such as an engine's, is around both runs and sees one.
TEST(Recompute, TheSecondRunIsInsideOfAllHooks) {
  Block block;
  std::vector<int> seen;
  Order before(seen, 1), after(seen, 2);
  block->hooks().add(before);
  RecomputedUnits recomputed(block, [](const std::string&, torch::nn::Module&) { return true; });
  block->hooks().add(after);
  block->forward(numbers({4, 6})).sum().backward();
  EXPECT_EQ(block->runs, 2);
  EXPECT_EQ(seen, (std::vector<int>{1, 2}));
  recomputed = {};
  block->hooks().remove(before);
  block->hooks().remove(after);
}

TEST(Recompute, AForwardThatDiffersTheSecondTimeIsNamed) {
  int runs = 0;
  const auto refused = [&](auto&& forward) {
    runs = 0;
    const Tensor x = numbers({4, 6}).requires_grad_();
    const Tensor y = recompute({.name = "Unit 'blocks.3'"}, forward, x);
    return thrown([&] { y.sum().backward(); });
  };
  EXPECT_EQ(refused([&](const Tensor& x) { return ++runs == 1 ? x.sin() : x.sin().exp(); }),
            "Unit 'blocks.3' saved 1 tensors for backward, and more when it ran again: it must do the same both times");
  EXPECT_EQ(refused([&](const Tensor& x) { return ++runs == 1 ? x.sin().exp() : x.sin(); }),
            "Unit 'blocks.3' saved 2 tensors for backward, and 1 when it ran again: it must do the same both times");
  EXPECT_EQ(refused([&](const Tensor& x) { return ++runs == 1 ? x.sin().sum() : x.narrow(0, 0, 2).sin().sum(); }),
            "Unit 'blocks.3' saved a Float of [4, 6] as tensor 0 for backward, and a Float of [2, 6] when it ran again: it "
            "must do the same both times");
  EXPECT_EQ(refused([&](const Tensor& x) { return (++runs == 1 ? x : x.to(at::kDouble)).sin().sum(); }),
            "Unit 'blocks.3' saved a Float of [4, 6] as tensor 0 for backward, and a Double of [4, 6] when it ran again: it "
            "must do the same both times");
}

TEST(Recompute, WhatIsChangedInPlaceIsNamed) {
  const auto start = [] { return numbers({4, 6}).requires_grad_().mul(1); };
  Tensor x = start();
  EXPECT_EQ(thrown([&] {
              recompute(
                  {.name = "Unit 'a'"}, [](Tensor y) { return y.mul_(2).sin(); }, x);
            }),
            "Unit 'a' writes in place to its input 0, from which it is to be recomputed; allowed: a forward that leaves its "
            "inputs as they are (give it a clone)");
  x = start();
  Tensor y = recompute(
      {.name = "Unit 'a'"}, [](const Tensor& in) { return in.sin(); }, x);
  x.mul_(2);
  EXPECT_EQ(thrown([&] { y.sum().backward(); }),
            "input 0 of Unit 'a' was changed in place between its forward and the backward that runs it again");
  Block block;
  y = recompute({.name = "Unit 'a'"}, block, numbers({4, 6}));
  const auto change = [&] {
    const at::NoGradGuard no_grad;
    block->up->weight.mul_(2);
  };
  change();
  EXPECT_EQ(
      thrown([&] { y.sum().backward(); }),
      "parameter 'up.weight' of Unit 'a' was changed in place between its forward and the backward that runs it again");
  y = recompute(
      {.name = "Unit 'a'"}, [block](const Tensor& in) mutable { return block->forward(in); }, start());
  change();
  EXPECT_EQ(thrown([&] { y.sum().backward(); }),
            "a parameter of Unit 'a' was changed in place between its forward and the backward that runs it again");
}

TEST(Recompute, AnErrorInEitherRunReachesTheCaller) {
  int runs = 0;
  const auto forward = [&](const Tensor& x) {
    if (++runs == 2) throw std::runtime_error("no");
    return x.sin();
  };
  const Tensor x = numbers({3}).requires_grad_();
  Tensor y = recompute(forward, x);
  EXPECT_EQ(thrown([&] { y.sum().backward(); }), "no");
  runs = 1;
  EXPECT_EQ(thrown([&] { recompute(forward, x); }), "no");
  // Nothing of it stays behind.
  y = x.sin();
  y.sum().backward();
  EXPECT_TRUE(at::equal(x.grad(), x.cos()));
}

TEST(Recompute, ABackwardInsideOfAForwardIsRefused) {
  const Tensor x = numbers({3}).requires_grad_();
  EXPECT_EQ(thrown([&] {
              recompute(
                  [](const Tensor& y) {
                    y.sin().sum().backward();
                    return y;
                  },
                  x);
            }),
            "a recomputed forward runs a backward inside of its forward, and cannot be recomputed");
}

}  // namespace
}  // namespace bonfire::recompute_test
