#include "bonfire/nn/split_products.h"

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <fmt/format.h>

#include "bonfire/base/error.h"
#include "bonfire/kernels/cross_entropy.h"
#include "bonfire/kernels/partial_cross_entropy.h"
#include "bonfire/nn/sequence_regions.h"
#include "tests/support/rank_memory.h"
#include "tests/support/ranks.h"
#include "tests/support/thrown.h"

// Products and the loss of split weights, against those of one rank.
namespace bonfire::split_products_test {
namespace {
using at::Tensor;
using testing::run_ranks;

constexpr std::int64_t batch = 2, sequence = 6, width = 8, classes = 11;

Tensor numbers(at::IntArrayRef sizes, double step) {
  const Tensor flat = at::arange(c10::multiply_integers(sizes), at::kDouble);
  return flat.mul(step).add(step).sin().view(sizes);
}

// What a rank has of what lies between split layers.
Tensor own_positions(const Tensor& x, const TensorRanks& ranks) {
  if (!ranks.sequence) return x.clone();
  const std::int64_t part = x.size(1) / ranks.group.size();
  return x.narrow(1, ranks.group.rank() * part, part).clone();
}

struct Rows {
  std::int64_t begin, end;
};
Rows own_rows(std::int64_t rows, const TensorRanks& ranks) {
  return {rows * ranks.group.rank() / ranks.group.size(), rows * (ranks.group.rank() + 1) / ranks.group.size()};
}

void expect_close(const Tensor& seen, const Tensor& expected, const std::string& what) {
  EXPECT_TRUE(at::allclose(seen, expected, 1e-12, 1e-13)) << what << "\n" << seen << "\n" << expected;
}

// Whole, and in chunks of two or three rows; with targets that are ignored.
TEST(SplitProducts, HaveTheLossOfOneRank) {
  const Tensor target = at::arange(batch * sequence).mul(5).remainder(classes).view({batch, sequence});
  target[0][1].fill_(-100);
  target[1][5].fill_(-100);
  Tensor x = numbers({batch, sequence, width}, 0.7).requires_grad_(),
         weight = numbers({classes, width}, 0.3).requires_grad_();
  const Tensor expected = linear_cross_entropy(x, weight, target, {});
  (expected * 3).backward();
  for (const int count : {2, 3})
    for (const bool along : {false, true})
      for (const std::int64_t most : {most_logit_bytes, std::int64_t{3 * 8 * 4}}) {
        const std::string what = fmt::format("{} ranks{}, at most {} bytes", count, along ? " with sequences" : "", most);
        run_ranks(count, [&](World& world) {
          const TensorRanks ranks{.group = world.mesh({.tensor = count}).group(Axis::tensor), .sequence = along};
          const auto [begin, end] = own_rows(classes, ranks);
          Tensor own_x = own_positions(x.detach(), ranks).requires_grad_();
          Tensor own = weight.detach().narrow(0, begin, end - begin).clone().requires_grad_();
          const Tensor loss =
              rows_cross_entropy(own_x, own, target, {.first = begin, .classes = classes, .most_logit_bytes = most}, ranks);
          (loss * 3).backward();
          expect_close(loss, expected.detach(), what);
          expect_close(own.grad(), weight.grad().narrow(0, begin, end - begin), what);
          expect_close(own_x.grad(), own_positions(x.grad(), ranks), what);
        });
      }
}

// Without a norm, with further dimensions or fewer, and with parts that are not alike.
TEST(SplitProducts, AreProductsOfOneRank) {
  const std::int64_t wide = 7;
  for (const std::vector<std::int64_t>& sizes : {std::vector<std::int64_t>{5, width}, {2, 3, 4, width}}) {
    Tensor x = numbers(sizes, 0.7).requires_grad_(), up = numbers({wide, width}, 0.3).requires_grad_(),
           up_bias = numbers({wide}, 0.9).requires_grad_(), down = numbers({width, wide}, 0.2).requires_grad_(),
           down_bias = numbers({width}, 0.4).requires_grad_();
    const Tensor expected = at::linear(at::linear(x, up, up_bias).tanh(), down, down_bias).add(x);
    const Tensor gradient = numbers(sizes, 1.3);
    expected.backward(gradient);
    run_ranks(3, [&](World& world) {
      const TensorRanks ranks{.group = world.mesh({.tensor = 3}).group(Axis::tensor)};
      const auto [begin, end] = own_rows(wide, ranks);
      const auto part = [&, begin = begin, end = end](const Tensor& of, std::int64_t dim) {
        return of.detach().narrow(dim, begin, end - begin).clone();
      };
      Tensor own_x = x.detach().clone().requires_grad_(), own_up = part(up, 0).requires_grad_(),
             own_bias = part(up_bias, 0).requires_grad_(), own_down = part(down, 1).requires_grad_(),
             all_bias = down_bias.detach().clone().requires_grad_();
      const auto [hidden, stream] = rows_linear(own_x, {}, own_up, {.bias = own_bias}, ranks);
      const Tensor out = columns_linear(hidden.tanh(), own_down, {.linear = {.bias = all_bias, .residual = stream}}, ranks);
      out.backward(gradient);
      expect_close(out, expected.detach(), "result");
      expect_close(own_x.grad(), x.grad(), "x");
      expect_close(own_up.grad(), part(up.grad(), 0), "up");
      expect_close(own_bias.grad(), part(up_bias.grad(), 0), "bias up");
      expect_close(own_down.grad(), part(down.grad(), 1), "down");
      expect_close(all_bias.grad(), down_bias.grad(), "bias down");
    });
  }
}

// More chunks than samples, fewer, and as many; samples and positions that they do not divide.
TEST(SplitProducts, InChunksAreThoseInOnePiece) {
  const std::int64_t wide = 10;
  for (const std::int64_t samples : {1, 3})
    for (const bool along : {false, true}) {
      const Tensor x = numbers({samples, sequence, width}, 0.7), up = numbers({wide, width}, 0.3),
                   up_bias = numbers({wide}, 0.9), down = numbers({width, wide}, 0.2), down_bias = numbers({width}, 0.4);
      run_ranks(2, [&](World& world) {
        TensorRanks ranks{.group = world.mesh({.tensor = 2}).group(Axis::tensor), .sequence = along};
        const auto [begin, end] = own_rows(wide, ranks);
        const auto results = [&, begin = begin, end = end](int chunks) {
          ranks.chunks = chunks;
          const auto part = [&](const Tensor& of, std::int64_t dim) {
            return of.narrow(dim, begin, end - begin).clone().requires_grad_();
          };
          std::vector<Tensor> leaves{own_positions(x, ranks).requires_grad_(), part(up, 0), part(up_bias, 0), part(down, 1),
                                     down_bias.clone().requires_grad_()};
          const auto [hidden, stream] = rows_linear(leaves[0], {}, leaves[1], {.bias = leaves[2]}, ranks);
          const Tensor out = columns_linear(
              hidden, leaves[3], {.activation = Activation::gelu, .linear = {.bias = leaves[4], .residual = stream}}, ranks);
          out.backward(own_positions(numbers(x.sizes(), 1.3), ranks));
          std::vector<Tensor> all{out.detach()};
          for (const Tensor& leaf : leaves) all.push_back(leaf.grad());
          return all;
        };
        const auto expected = results(1);
        for (const int chunks : {2, 3, 7}) {
          const auto seen = results(chunks);
          for (std::size_t at = 0; at < seen.size(); ++at)
            expect_close(seen[at], expected[at],
                         fmt::format("{} of {} samples in {} chunks{}", at, samples, chunks, along ? ", sequences" : ""));
        }
      });
    }
}

TEST(SplitProducts, LossesOfNarrowLogitsAreRoundedOnce) {
  const Tensor logits = numbers({40, 300}, 0.7).mul(20), target = at::arange(40).mul(7).remainder(300);
  const Tensor narrow = logits.to(at::kBFloat16), wide = narrow.to(at::kDouble);
  const auto joined = join_softmax(partial_softmax(narrow, target).unsqueeze(0));
  EXPECT_TRUE(at::allclose(joined.losses, at::cross_entropy_loss(wide, target, {}, at::Reduction::None), 1e-4, 1e-5));
  make_own_gradient(narrow, {.target = target, .sums = joined.sums, .counted = at::ones({40}, at::kBool)});
  const Tensor expected = at::softmax(wide, 1).scatter_add(1, target.unsqueeze(1), at::full({40, 1}, -1.0, at::kDouble));
  EXPECT_LT((narrow.to(at::kDouble) - expected).abs().max().item<double>(), 0.005);
}

// Forward and backward, of two ranks: less than 0.6 of what one needs.
TEST(SplitProducts, TheLossNeedsHalfTheMemory) {
  constexpr std::int64_t rows = 256, vocabulary = 4096, narrow = 16;
  run_ranks(2, [](World& world) {
    const TensorRanks ranks{.group = world.mesh({.tensor = 2}).group(Axis::tensor)};
    const Tensor target = at::arange(rows).mul(31).remainder(vocabulary).view({1, rows});
    const auto peak_of = [&](std::int64_t own, const std::function<Tensor(const Tensor& x, const Tensor& weight)>& loss) {
      const Tensor x = at::ones({1, rows, narrow}).requires_grad_(), weight = at::ones({own, narrow}).requires_grad_();
      testing::RankMemory memory;
      loss(x, weight).backward();
      return memory.peak();
    };
    const auto plain = peak_of(
        vocabulary, [&](const Tensor& x, const Tensor& weight) { return linear_cross_entropy(x, weight, target, {}); });
    const auto split = peak_of(vocabulary / 2, [&](const Tensor& x, const Tensor& weight) {
      return rows_cross_entropy(x, weight, target, {.first = ranks.group.rank() * vocabulary / 2, .classes = vocabulary},
                                ranks);
    });
    EXPECT_GT(plain, rows * vocabulary * 4);
    EXPECT_LE(static_cast<double>(split), 0.6 * static_cast<double>(plain)) << split << " and " << plain;
  });
}

TEST(SplitProducts, RefuseWhatDoesNotFit) {
  const TensorRanks alone{};
  const Tensor x = numbers({batch, sequence, width}, 1);
  const auto refused = [](const std::string& words, const std::function<void()>& what) {
    testing::expect_part(testing::thrown<Error>(what), words);
  };
  const Tensor up = numbers({3, width}, 1), row = numbers({3}, 1), whole = numbers({width}, 1), one = numbers({1}, 1);
  refused("rows_linear: weight is Double [3, 5] on cpu; allowed beside Double [2, 6, 8] on cpu: [any, 8] on the same device",
          [&] {
            rows_linear(x, {}, numbers({3, 5}, 1), {}, alone);
          });
  refused("rows_linear: weight is Double [8] on cpu", [&] { rows_linear(x, {}, whole, {}, alone); });
  // These would be broadcast.
  refused("rows_linear: bias is Double [1] on cpu; allowed beside Double [2, 6, 8] on cpu: [3]",
          [&] { rows_linear(x, {}, up, {.bias = one}, alone); });
  refused("rows_linear: the norm's weight is Double [1] on cpu",
          [&] { rows_linear(x, {.weight = one}, up, {.bias = row}, alone); });
  refused("rows_linear: the norm's bias is Double [3] on cpu",
          [&] { rows_linear(x, {.weight = whole, .bias = row}, up, {}, alone); });
  refused("rows_linear: its options have a residual", [&] { rows_linear(x, {}, up, {.residual = x}, alone); });
  refused("norm_between: the norm's weight is Double [1] on cpu", [&] { norm_between(x, {.weight = one}, alone); });

  refused("columns_linear: weight is Double [3, 5] on cpu; allowed beside Double [2, 6, 8] on cpu: [any, 8]", [&] {
    columns_linear(x, numbers({3, 5}, 1), {}, alone);
  });
  refused("columns_linear: weight is Double [3, 8] on cpu; allowed beside Double [2, 6, 8] on cpu: [any, 4]",
          [&] { columns_linear(x, up, {.activation = Activation::swiglu}, alone); });
  refused("columns_linear: x, gates and ups, is Double [2, 5] on cpu; allowed: an even last dimension", [&] {
    columns_linear(numbers({2, 5}, 1), up, {.activation = Activation::swiglu}, alone);
  });
  refused("columns_linear: bias is Double [1] on cpu; allowed beside Double [2, 6, 8] on cpu: [3]",
          [&] { columns_linear(x, up, {.linear = {.bias = one}}, alone); });
  refused("columns_linear: residual is Double [3] on cpu; allowed beside Double [2, 6, 8] on cpu: [2, 6, 3]",
          [&] { columns_linear(x, up, {.linear = {.residual = row}}, alone); });

  const Tensor weight = numbers({classes, width}, 1);
  refused("a target is none of 0 to 10", [&] {
    rows_cross_entropy(x, weight, at::full({batch, sequence}, classes), {.classes = classes}, alone);
  });
  refused("rows_cross_entropy: target is [2, 5] for x of [2, 6, 8]; allowed: 12 targets", [&] {
    rows_cross_entropy(x, weight, at::zeros({2, 5}, at::kLong), {.classes = classes}, alone);
  });
  refused("rows_cross_entropy: target is Double [2, 6] on cpu; allowed: whole numbers", [&] {
    rows_cross_entropy(x, weight, numbers({2, 6}, 1), {.classes = classes}, alone);
  });
  refused("rows_cross_entropy: the weight is [11, 8], rows from 1 on of 11 classes; allowed: rows of them", [&] {
    rows_cross_entropy(x, weight, at::zeros({2, 6}, at::kLong), {.first = 1, .classes = classes}, alone);
  });

  refused("gather_shared_heads: packed is [2, 6, 8] with 3 elements of queries",
          [&] { gather_shared_heads(x, {.queries = 3}); });
  refused("gather_shared_heads: packed is [2, 6, 8] with 8 elements of queries",
          [&] { gather_shared_heads(x, {.queries = 8}); });
  refused("gather_shared_heads: packed is Double [8] on cpu", [&] { gather_shared_heads(whole, {.queries = 4}); });

  refused("sum_of_parts: positions is Double [6, 1] on cpu; allowed beside Double [2, 6, 8] on cpu: [any, 8]", [&] {
    sum_of_parts(x, numbers({sequence, 1}, 1), alone);
  });
  refused("sum_of_parts: places is Long [1] on cpu; allowed beside Double [2, 6, 8] on cpu: [6]", [&] {
    sum_of_parts(x, numbers({sequence, width}, 1), at::zeros({1}, at::kLong), alone);
  });
}

// On one rank alone, and before it has sent anything: the other one is not left waiting, and both can go on.
TEST(SplitProducts, RefuseBeforeAnythingIsExchanged) {
  run_ranks(2, [](World& world) {
    for (const bool along : {false, true}) {
      const TensorRanks ranks{
          .group = world.mesh({.tensor = 2}).group(Axis::tensor), .sequence = along, .chunks = along ? 2 : 1};
      const Tensor x = numbers({batch, sequence, width}, 1), weight = numbers({classes, width}, 1);
      const std::int64_t all = batch * sequence * (along ? 2 : 1);
      const auto loss = [&](std::int64_t targets) {
        rows_cross_entropy(x, weight, at::zeros({targets}, at::kLong),
                           {.first = world.rank() * classes, .classes = 2 * classes}, ranks);
      };
      const auto up = [&](const Tensor& bias) { rows_linear(x, {}, weight, {.bias = bias}, ranks); };
      const auto down = [&](const Tensor& residual) {
        columns_linear(x, weight, {.linear = {.residual = residual}}, ranks);
      };
      if (world.rank() == 0) {
        const std::string sizes = along ? "[2, 6, 8] on each of 2 ranks" : "[2, 6, 8]";
        testing::expect_part(testing::thrown<Error>([&] { loss(all - 1); }), "for x of " + sizes);
        testing::expect_part(testing::thrown<Error>([&] { up(numbers({1}, 1)); }), "rows_linear: bias is Double [1]");
        testing::expect_part(testing::thrown<Error>([&] {
                               down(numbers({batch, sequence + 1, classes}, 1));
                             }),
                             fmt::format("[2, {}, 11] on the same device", along ? sequence / 2 : sequence));
      }
      loss(all);
      up(numbers({classes}, 1));
      down(numbers({batch, along ? sequence / 2 : sequence, classes}, 1));
    }
  });
}

}  // namespace
}  // namespace bonfire::split_products_test
