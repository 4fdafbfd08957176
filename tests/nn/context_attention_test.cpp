#include "bonfire/nn/context_attention.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <fmt/format.h>

#include "bonfire/base/error.h"
#include "bonfire/base/random.h"
#include "bonfire/kernels/cross_entropy.h"
#include "bonfire/kernels/self_attention.h"
#include "bonfire/nn/layers.h"
#include "tests/support/ranks.h"
#include "tests/support/thrown.h"

// Attention of ranks that share samples, against attention of one rank to each document alone.
namespace bonfire::context_attention_test {
namespace {
using at::Tensor;
using testing::run_ranks;

struct Case {
  int ranks;
  ContextWay way;
  std::int64_t heads, kv_heads;
  bool turns = true;  // rotary positions

  std::string words() const {
    return fmt::format("{} ranks by {}, {} heads, {} of keys{}", ranks, way == ContextWay::ring ? "ring" : "heads", heads,
                       kv_heads, turns ? ", turning" : "");
  }
};

std::vector<Case> cases() {
  using enum ContextWay;
  return {{1, ring, 4, 2},         {2, ring, 4, 2}, {2, heads, 4, 2}, {2, heads, 2, 2, false}, {3, ring, 4, 1},
          {3, heads, 6, 3, false}, {4, ring, 4, 4}, {4, heads, 8, 4}, {4, ring, 6, 2, false}};
}

constexpr std::int64_t batch = 2, size = 6;

Tensor numbers(at::IntArrayRef sizes, double step) {
  return at::arange(c10::multiply_integers(sizes), at::kDouble).mul(step).add(step).sin().mul(1.5).view(sizes);
}

QkvLayout layout_of(const Case& each, std::int64_t positions, at::ScalarType type) {
  QkvLayout layout{.heads = each.heads, .kv_heads = each.kv_heads};
  if (each.turns)
    layout.rotary = rotary_table({.positions = positions, .head_dim = size}, type == at::kDouble ? at::kDouble : at::kFloat);
  return layout;
}

struct Whole {
  Tensor out, gradient;
};

// Each document by itself, from position 0 on. `starts` undefined: each sample is one.
Whole one_rank(const Tensor& qkv, const Tensor& d_out, const QkvLayout& layout, const Tensor& starts) {
  const Tensor x = qkv.clone().requires_grad_();
  std::vector<Tensor> samples;
  for (std::int64_t sample = 0; sample < x.size(0); ++sample) {
    std::vector<Tensor> documents;
    std::int64_t begin = 0;
    while (begin < x.size(1)) {
      std::int64_t end = begin + 1;
      while (end < x.size(1) && !(starts.defined() && starts[sample][end].item<std::int64_t>() == end)) ++end;
      documents.push_back(self_attention(x.narrow(0, sample, 1).narrow(1, begin, end - begin), layout, {.causal = true}));
      begin = end;
    }
    samples.push_back(at::cat(documents, 1));
  }
  const Tensor out = at::cat(samples);
  out.backward(d_out);
  return {out.detach(), x.grad()};
}

Tensor random_starts(const Random& random, std::int64_t positions) {
  Tensor starts = at::zeros({batch, positions}, at::kLong);
  const std::uint64_t often = 1 + random.below(0, 6);
  for (std::int64_t sample = 0; sample < batch; ++sample)
    for (std::int64_t at = 1; at < positions; ++at) {
      const bool begins = random.below(1 + static_cast<std::uint64_t>(sample * positions + at), 8) < often - 1;
      starts[sample][at] = begins ? at : starts[sample][at - 1].item<std::int64_t>();
    }
  return starts;
}

void expect_close(const Tensor& seen, const Tensor& expected, double tolerance, const std::string& what) {
  ASSERT_EQ(seen.sizes(), expected.sizes()) << what;
  EXPECT_LE((seen.to(at::kDouble) - expected.to(at::kDouble)).abs().max().item<double>(),
            tolerance * expected.abs().max().item<double>())
      << what;
}

struct Problem {
  Tensor qkv, d_out, starts;
};

Problem problem_of(const Case& each, std::int64_t positions, const Tensor& starts, at::ScalarType type) {
  return {numbers({batch, positions, (each.heads + 2 * each.kv_heads) * size}, 0.37).to(type),
          numbers({batch, positions, each.heads * size}, 0.61).to(type), starts};
}

struct Made {
  Tensor out, gradient;
};

// What each rank makes of each problem.
std::vector<std::vector<Made>> on_ranks(const Case& each, const std::vector<Problem>& problems) {
  std::vector<std::vector<Made>> made(static_cast<std::size_t>(each.ranks));
  run_ranks(each.ranks, [&](World& world) {
    const ContextRanks ranks{.group = world.mesh({.context = each.ranks}).group(Axis::context), .way = each.way};
    for (const auto& [qkv, d_out, starts] : problems) {
      const auto layout = layout_of(each, qkv.size(1), qkv.scalar_type());
      const Documents documents = starts.defined() ? Documents(starts) : Documents();
      const Tensor own = own_positions(qkv, ranks.part()).clone().requires_grad_();
      const Tensor out = context_attention(own, layout, documents, ranks);
      out.backward(own_positions(d_out, ranks.part()));
      made[static_cast<std::size_t>(world.rank())].push_back({out.detach(), own.grad()});
    }
  });
  return made;
}

void expect_like_one_rank(const Case& each, const std::vector<Problem>& problems, double tolerance) {
  const auto made = on_ranks(each, problems);
  for (std::size_t at = 0; at < problems.size(); ++at) {
    const auto& [qkv, d_out, starts] = problems[at];
    const auto expected =
        one_rank(qkv.to(at::kDouble), d_out.to(at::kDouble), layout_of(each, qkv.size(1), at::kDouble), starts);
    for (int rank = 0; rank < each.ranks; ++rank) {
      const ContextPart part{rank, each.ranks};
      const auto& own = made[static_cast<std::size_t>(rank)][at];
      const std::string what = fmt::format("{}, problem {}", each.words(), at);
      expect_close(own.out, own_positions(expected.out, part), tolerance, what + ", result");
      expect_close(own.gradient, own_positions(expected.gradient, part), tolerance, what + ", gradient");
    }
  }
}

TEST(ContextAttention, IsThatOfOneRank) {
  for (const auto& each : cases())
    expect_like_one_rank(each, {problem_of(each, 24, {}, at::kDouble), problem_of(each, 2 * each.ranks, {}, at::kDouble)},
                         1e-12);
  const Case two{2, ContextWay::ring, 4, 2}, four{4, ContextWay::ring, 4, 2};
  expect_like_one_rank(two, {problem_of(two, 72, {}, at::kFloat)}, 1e-5);
  expect_like_one_rank(four, {problem_of(four, 72, {}, at::kBFloat16)}, 0.02);
}

TEST(ContextAttention, OfDocumentsIsThatOfEachAlone) {
  for (const auto& each : cases()) {
    std::vector<Problem> problems;
    for (std::uint64_t seed = 0; seed < 12; ++seed) {
      const std::int64_t positions = 2 * each.ranks * static_cast<std::int64_t>(1 + seed % 4);
      problems.push_back(problem_of(each, positions, random_starts(Random(seed), positions), at::kDouble));
    }
    expect_like_one_rank(each, problems, 1e-12);
  }
}

TEST(ContextAttention, TwiceIsTheSameToTheBit) {
  for (const auto& each : cases()) {
    const auto problem = problem_of(each, 48, {}, at::kFloat);
    for (const auto& of_rank : on_ranks(each, {problem, problem})) {
      EXPECT_TRUE(at::equal(of_rank[0].out, of_rank[1].out)) << each.words();
      EXPECT_TRUE(at::equal(of_rank[0].gradient, of_rank[1].gradient)) << each.words();
    }
  }
}

// Every pair of a row and what it sees is in one part of one rank, and all ranks have as many.
TEST(SequencePlaces, EveryPairIsSomewhereOnce) {
  for (const int ranks : {1, 2, 3, 5})
    for (std::uint64_t seed = 0; seed < 9; ++seed) {
      const std::int64_t own = ranks == 1 ? 7 : 2 * static_cast<std::int64_t>(1 + seed % 4), positions = own * ranks;
      const Tensor starts = seed == 0 ? Tensor() : random_starts(Random(seed), positions);
      const std::int64_t samples = starts.defined() ? batch : 1;
      std::multiset<std::pair<std::int64_t, std::int64_t>> seen, expected;
      std::vector<std::size_t> of_ranks;
      const auto place = [&](int rank, std::int64_t row) {
        for (const auto& stretch : stretches_of({rank, ranks}, own))
          if (row % own >= stretch.own && row % own < stretch.own + stretch.count)
            return row / own * positions + stretch.place + row % own - stretch.own;
        return std::int64_t{-1};
      };
      for (int rank = 0; rank < ranks; ++rank) {
        const SequencePlaces places({rank, ranks}, own, starts);
        const std::size_t before = seen.size();
        for (int from = 0; from < ranks; ++from)
          for (const auto& part : places.seen(from))
            for (std::int64_t row = 0; row < part.queries; ++row)
              for (std::int64_t key = 0; key < (part.causal ? row + 1 : part.keys); ++key)
                seen.emplace(place(rank, part.query + row), place(from, part.key + key));
        of_ranks.push_back(seen.size() - before);
        for (int from = 0; from < ranks; ++from) EXPECT_TRUE(seed > 0 || places.seen(from).size() == 1);
      }
      for (std::int64_t sample = 0; sample < samples; ++sample)
        for (std::int64_t row = 0; row < positions; ++row)
          for (std::int64_t key = starts.defined() ? starts[sample][row].item<std::int64_t>() : 0; key <= row; ++key)
            expected.emplace(sample * positions + row, sample * positions + key);
      EXPECT_EQ(seen, expected) << ranks << " ranks, seed " << seed;
      EXPECT_TRUE(seed > 0 || std::set(of_ranks.begin(), of_ranks.end()).size() == 1) << ranks;
    }
}

TEST(SequencePlaces, AreCountedFromTheBeginningOfTheDocument) {
  const Tensor starts = at::tensor({0, 0, 0, 3, 3, 5, 5, 5}, at::kLong).view({1, 8});
  EXPECT_TRUE(at::equal(SequencePlaces({0, 2}, 4, starts).places(), at::tensor({0, 1, 1, 2}, at::kLong).view({1, 4})));
  EXPECT_TRUE(at::equal(SequencePlaces({1, 2}, 4, starts).places(), at::tensor({2, 0, 1, 0}, at::kLong).view({1, 4})));
  EXPECT_TRUE(at::equal(SequencePlaces({1, 2}, 4, {}).places(), at::tensor({2, 3, 4, 5}, at::kLong)));
}

// The mean over ranks is that over all targets, whoever has those that count; a rank may have none.
TEST(ContextAttention, LossesAreWeighedByTargets) {
  constexpr std::int64_t classes = 5;
  const Tensor logits = numbers({1, 8, classes}, 0.7).requires_grad_();
  const Tensor target = at::tensor({-100, -100, 3, 1, 4, -100, -100, -100}, at::kLong).view({1, 8});
  const Tensor expected = cross_entropy(logits, target, {});
  expected.backward();
  double sum = 0;
  std::mutex mutex;
  run_ranks(2, [&](World& world) {
    const ContextRanks ranks{.group = world.mesh({.context = 2}).group(Axis::context)};
    const Tensor own = own_positions(logits.detach(), ranks.part()).clone().requires_grad_(),
                 own_target = own_positions(target, ranks.part());
    const Tensor loss = weighed_by_targets(cross_entropy(own, own_target, {}), own_target, ranks);
    loss.backward();
    EXPECT_TRUE(at::allclose(own.grad() / 2, own_positions(logits.grad(), ranks.part()), 1e-12, 1e-14));
    const std::lock_guard lock(mutex);
    sum += loss.item<double>() / 2;
  });
  EXPECT_NEAR(sum, expected.item<double>(), 1e-12);
}

TEST(ContextAttention, RefusesWhatDoesNotFit) {
  testing::expect_part(testing::thrown<Error>([] {
                         own_positions(at::zeros({2, 10}), {0, 2});
                       }),
                       "a sequence of 10 positions over 2 ranks; allowed: a multiple of 4");
  testing::expect_part(testing::thrown<Error>([] {
                         Documents(at::tensor({0, 2, 2}, at::kLong).view({1, 3}));
                       }),
                       "documents: position 1 of sample 0 is in one that begins at 2");
  run_ranks(2, [](World& world) {
    const ContextRanks ranks{.group = world.mesh({.context = 2}).group(Axis::context), .way = ContextWay::heads};
    testing::expect_part(testing::thrown<Error>([&] {
                           context_attention(at::zeros({1, 4, 6 * size}), {.heads = 4, .kv_heads = 1}, {}, ranks);
                         }),
                         "1 heads of keys over 2 ranks that exchange them; allowed: a multiple of 2");
    // A column would be lost.
    for (const auto way : {ContextWay::heads, ContextWay::ring})
      testing::expect_part(
          testing::thrown<Error>([&] {
            context_attention(at::zeros({1, 4, 65}), {.heads = 4, .kv_heads = 2}, {}, {.group = ranks.group, .way = way});
          }),
          "qkv is [1, 4, 65]; allowed: [batch, sequence, 8 heads of one size]");
    testing::expect_part(testing::thrown<Error>([&] {
                           context_attention(at::zeros({1, 4, 8 * size}),
                                             {.heads = 4, .kv_heads = 2, .rotary = rotary_table({8, size + 2}, at::kFloat)},
                                             {}, ranks);
                         }),
                         "the table of cosines is Float [8, 4] on cpu; allowed beside Float [1, 4, 48] on cpu: [any, 3]");
    testing::expect_part(testing::thrown<Error>([&] {
                           context_attention(at::zeros({4, 48}), {.heads = 4, .kv_heads = 2}, {}, ranks);
                         }),
                         "qkv is Float [4, 48] on cpu; allowed beside Float [4, 48] on cpu: [any, any, any]");
    testing::expect_part(testing::thrown<ConfigError>([&] {
                           nn::Attention(nn::Linear(at::zeros({12, 4})), nn::Linear(at::zeros({4, 4})),
                                         nn::AttentionOptions{.causal = false, .context = ranks});
                         }),
                         "attention that is not causal over 2 ranks that share samples; allowed: causal");
  });
}

}  // namespace
}  // namespace bonfire::context_attention_test
