// Reversible blocks against the same function whose inputs are stored.
#include "bonfire/nn/reversible.h"

#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>

#include "bonfire/base/error.h"
#include "bonfire/nn/layers.h"
#include "tests/support/rank_memory.h"
#include "tests/support/thrown.h"

namespace bonfire::reversible_test {
namespace {

using at::Tensor;

constexpr std::int64_t batch = 2, sequence = 5, dim = 8, ffn = 12, heads = 2;

// Attention and a feed-forward part as models have them, with dropout where there is a state.
struct Parts {
  Parts(at::ScalarType type, const std::shared_ptr<DropoutState>& state, int number) {
    const auto weight = [&](std::int64_t rows, std::int64_t columns) {
      return at::randn({rows, columns}, type).mul(0.3).requires_grad_();
    };
    const auto norm_of = [&] { return nn::Norm(at::rand({dim}, type).add(0.5).requires_grad_(), Tensor(), 1e-5); };
    norm = norm_of();
    feed_norm = norm_of();
    attention = nn::Attention(nn::Linear(weight(3 * dim, dim)), nn::Linear(weight(dim, dim)),
                              nn::AttentionOptions{.layout = {.heads = heads, .kv_heads = heads},
                                                   .dropout = Dropout(0.2, state, fmt::format("{}.attention", number))});
    feed = nn::FeedForward(nn::Activation::swiglu, nn::Linear(weight(2 * ffn, dim)), nn::Linear(weight(dim, ffn)),
                           Dropout(0.2, state, fmt::format("{}.feed", number)));
    for (const auto& module :
         std::vector<std::shared_ptr<torch::nn::Module>>{norm.ptr(), feed_norm.ptr(), attention.ptr(), feed.ptr()})
      for (const auto& parameter : module->parameters()) parameters.push_back(parameter);
  }

  Tensor first(const Tensor& x) { return attention->branch(norm, x); }
  Tensor second(const Tensor& x) { return feed->branch(feed_norm, x); }

  nn::Norm norm{nullptr}, feed_norm{nullptr};
  nn::Attention attention{nullptr};
  nn::FeedForward feed{nullptr};
  std::vector<Tensor> parameters;
};

struct Stack {
  Stack(int depth, at::ScalarType type, std::shared_ptr<DropoutState> state) : state(std::move(state)) {
    at::manual_seed(5);
    for (int at = 0; at < depth; ++at) parts.push_back(std::make_unique<Parts>(type, this->state, at));
    x = at::randn({2, batch, sequence, dim}, type).requires_grad_();
  }

  Tensor forward(Tensor y) {
    for (const auto& each : parts) {
      auto* const part = each.get();
      y = reversible(y, {.first = [part](const Tensor& one) { return part->first(one); },
                         .second = [part](const Tensor& one) { return part->second(one); },
                         .parameters = part->parameters,
                         .random = state,
                         .chain = chain});
    }
    return y;
  }
  Tensor stored(const Tensor& input) {
    Tensor first = input[0], second = input[1];
    for (const auto& each : parts) {
      first = first + each->first(second);
      second = second + each->second(first);
    }
    return at::stack({first, second});
  }
  std::vector<Tensor> all() {
    std::vector<Tensor> list{x};
    for (const auto& each : parts) list.insert(list.end(), each->parameters.begin(), each->parameters.end());
    return list;
  }
  std::vector<Tensor> take_gradients() {
    std::vector<Tensor> gradients;
    for (auto& each : all()) gradients.push_back(std::exchange(each.mutable_grad(), Tensor()));
    return gradients;
  }
  // Something of which every element matters.
  static Tensor loss(const Tensor& y) {
    return y.mul(at::linspace(0.5, 2, y.numel(), y.options()).view(y.sizes())).sin().sum();
  }

  std::shared_ptr<DropoutState> state;
  std::shared_ptr<ReversibleChain> chain = std::make_shared<ReversibleChain>();
  std::vector<std::unique_ptr<Parts>> parts;
  Tensor x;
};

double difference(const std::vector<Tensor>& seen, const std::vector<Tensor>& expected) {
  double squares = 0, size = 0;
  for (std::size_t at = 0; at < seen.size(); ++at) {
    squares += (seen[at] - expected[at]).square().sum().item<double>();
    size += expected[at].square().sum().item<double>();
  }
  return std::sqrt(squares / size);
}

std::shared_ptr<DropoutState> running(std::uint64_t step) {
  auto state = std::make_shared<DropoutState>();
  state->seed = Random(3);
  state->step = step;
  return state;
}

TEST(Reversible, GradientsAreThoseOfStoredInputs) {
  for (const int depth : {1, 2, 64})
    for (const bool drops : {false, true}) {
      Stack stack(depth, at::kDouble, drops ? running(7) : nullptr);
      const Tensor expected = stack.stored(stack.x);
      Stack::loss(expected).backward();
      const auto right = stack.take_gradients();
      const Tensor seen = stack.forward(stack.x);
      EXPECT_TRUE(at::allclose(seen, expected, 1e-12, 1e-12));
      const Tensor loss = Stack::loss(seen);
      // Where the run is by now does not matter.
      if (drops) stack.state->step = 8;
      loss.backward();
      EXPECT_LT(difference(stack.take_gradients(), right), 1e-9) << depth << (drops ? " with dropout" : "");
      if (drops) {
        EXPECT_EQ(stack.state->step, 8U);
      }
    }
}

TEST(Reversible, BackwardCanRunTwice) {
  Stack stack(5, at::kDouble, nullptr);
  const Tensor loss = Stack::loss(stack.forward(stack.x));
  loss.backward({}, /*retain_graph=*/true);
  const auto first = stack.take_gradients();
  loss.backward();
  EXPECT_LT(difference(stack.take_gradients(), first), 1e-12);
  EXPECT_NE(testing::thrown<std::exception>([&] { loss.backward(); }), "");
}

// Parts that are frozen, an input without gradient, and results that others read as well.
TEST(Reversible, WhateverIsTrained) {
  for (const bool input : {false, true}) {
    Stack stack(4, at::kDouble, nullptr);
    stack.x.detach_().requires_grad_(input);
    for (auto& parameter : stack.parts[0]->parameters) parameter.set_requires_grad(false);
    for (std::size_t at = 0; at < 3; ++at) stack.parts[2]->parameters[at].set_requires_grad(false);
    const auto gradients = [&](const Tensor& y) {
      Stack::loss(y).backward();
      std::vector<Tensor> made;
      for (const auto& gradient : stack.take_gradients()) made.push_back(gradient.defined() ? gradient : at::zeros({1}));
      return made;
    };
    const auto right = gradients(stack.stored(stack.x));
    EXPECT_LT(difference(gradients(stack.forward(stack.x)), right), 1e-12);
  }
  Stack stack(3, at::kDouble, nullptr);
  const auto read_twice = [&](bool stored) {
    Tensor y = stack.x, sum = at::zeros({}, y.options());
    for (auto& part : stack.parts) {
      std::vector<std::unique_ptr<Parts>> one;
      one.push_back(std::move(part));
      std::swap(one, stack.parts);
      y = stored ? stack.stored(y) : stack.forward(y);
      std::swap(one, stack.parts);
      part = std::move(one.front());
      sum = sum + Stack::loss(y);
    }
    sum.backward();
    return stack.take_gradients();
  };
  const auto right = read_twice(true);
  EXPECT_LT(difference(read_twice(false), right), 1e-12);
}

// What is kept for backward does not grow with the depth; nor does the peak. What the chain would keep if each block stored
// its input does.
TEST(Reversible, MemoryIsConstantInDepth) {
  at::set_num_threads(1);
  struct Seen {
    std::int64_t kept = 0, peak = 0;
  };
  const auto measure = [&](int depth, bool stored) {
    Stack stack(depth, at::kDouble, nullptr);
    for (auto& parameter : stack.all()) parameter.mutable_grad() = at::zeros_like(parameter);
    testing::RankMemory memory;
    Seen seen;
    {
      const Tensor loss = (stored ? stack.stored(stack.x) : stack.forward(stack.x)).sum();
      seen.kept = memory.current();
      loss.backward();
    }
    seen.peak = memory.peak();
    return seen;
  };
  const auto few = measure(4, false), many = measure(64, false);
  const std::int64_t streams = 2 * batch * sequence * dim * 8;
  // The last block's result, and what the sum holds.
  EXPECT_EQ(few.kept, many.kept);
  EXPECT_LT(few.kept, streams + 512);
  EXPECT_EQ(few.peak, many.peak);
  EXPECT_GT(measure(64, true).kept, 12 * measure(4, true).kept);
}

// With rounding the inputs that are made again are not quite those that were there. That moves gradients about as far as
// rounding has moved them anyway: docs/reversible.md has the numbers.
TEST(Reversible, DriftsLittleWhereItRounds) {
  for (const auto type : {at::kFloat, at::kBFloat16})
    for (const int depth : {4, 16, 64}) {
      const auto gradients = [depth = depth](at::ScalarType as, bool stored) {
        Stack stack(depth, as, nullptr);
        // The same numbers in every type.
        const at::NoGradGuard no_grad;
        Stack rounded(depth, at::kBFloat16, nullptr);
        const auto from = rounded.all();
        auto to = stack.all();
        for (std::size_t at = 0; at < to.size(); ++at) to[at].copy_(from[at]);
        const at::AutoGradMode with_graph(true);
        const Tensor y = stored ? stack.stored(stack.x) : stack.forward(stack.x);
        Stack::loss(y.to(at::kFloat)).backward();
        std::vector<Tensor> made;
        for (const auto& gradient : stack.take_gradients()) made.push_back(gradient.to(at::kDouble));
        return made;
      };
      const auto exact = gradients(at::kDouble, true), right = gradients(type, true), seen = gradients(type, false);
      const double drift = difference(seen, right), rounding = difference(right, exact);
      EXPECT_LT(drift, 3 * rounding) << type << " " << depth;
      EXPECT_GT(drift, 0) << type << " " << depth;
      RecordProperty(fmt::format("{}_{}", at::toString(type), depth), fmt::format("{:.1e} of {:.1e}", drift, rounding));
    }
}

TEST(Reversible, WhatCannotBeIsRefused) {
  EXPECT_NE(testing::thrown<Error>([] {
              reversible(at::zeros({3, 4}), {});
            }).find("allowed: two streams"),
            std::string::npos);
  // The block in the middle has been told that the one behind it makes its result again; that one gets no gradient.
  Stack stack(2, at::kDouble, nullptr);
  auto last = std::move(stack.parts.back());
  stack.parts.pop_back();
  const Tensor middle = stack.forward(stack.x);
  std::swap(last, stack.parts.front());
  const Tensor end = stack.forward(middle);
  EXPECT_NE(testing::thrown<Error>([&] { middle.sum().backward(); }).find("backward did not go through that one"),
            std::string::npos);
}

}  // namespace
}  // namespace bonfire::reversible_test
