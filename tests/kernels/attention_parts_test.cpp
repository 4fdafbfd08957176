#include "bonfire/kernels/attention_parts.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <fmt/format.h>

#include "bonfire/base/error.h"
#include "tests/support/thrown.h"

// Attention over parts of the keys, against formulas over all of them.
namespace bonfire::attention_parts_test {
namespace {
using at::Tensor;

constexpr std::int64_t batch = 2, size = 8;

struct Inputs {
  Tensor q, k, v, d_out;
};

Inputs inputs(std::int64_t heads, std::int64_t kv_heads, std::int64_t queries, std::int64_t keys, at::ScalarType type) {
  const auto numbers = [&](std::int64_t count, std::int64_t rows, double step) {
    return at::arange(batch * count * rows * size, at::kDouble)
        .mul(step)
        .sin()
        .mul(2)
        .view({batch, count, rows, size})
        .to(type);
  };
  return {numbers(heads, queries, 0.7), numbers(kv_heads, keys, 0.9), numbers(kv_heads, keys, 0.4),
          numbers(heads, queries, 1.3)};
}

struct Expected {
  Tensor out, log_sums, d_q, d_k, d_v;
};

// By autograd, in fp64.
Expected expected_of(const Inputs& given, bool causal) {
  const auto leaf = [](const Tensor& x) { return x.to(at::kDouble).clone().requires_grad_(); };
  const Tensor q = leaf(given.q), k = leaf(given.k), v = leaf(given.v);
  const std::int64_t group = q.size(1) / k.size(1);
  Tensor scores = at::matmul(q, k.repeat_interleave(group, 1).transpose(2, 3)) / std::sqrt(static_cast<double>(size));
  if (causal)
    scores =
        scores.masked_fill(at::ones({q.size(2), k.size(2)}, at::kBool).triu(1), -std::numeric_limits<double>::infinity());
  const Tensor out = at::matmul(scores.softmax(3), v.repeat_interleave(group, 1));
  out.backward(given.d_out.to(at::kDouble));
  return {out.detach(), scores.detach().logsumexp(3), q.grad(), k.grad(), v.grad()};
}

// Rounding errors are of the size of the inputs, about 1, where gradients cancel out.
void expect_close(const Tensor& seen, const Tensor& expected, double tolerance, const std::string& what) {
  ASSERT_EQ(seen.sizes(), expected.sizes()) << what;
  EXPECT_LE((seen.to(at::kDouble) - expected).abs().max().item<double>(),
            tolerance * std::max(1.0, expected.abs().max().item<double>()))
      << what;
}

double tolerance_of(at::ScalarType type) { return type == at::kDouble ? 1e-12 : type == at::kFloat ? 2e-6 : 0.02; }

struct Case {
  std::int64_t heads, kv_heads, queries, keys;
  bool causal;
  at::ScalarType type;
  std::string words() const {
    return fmt::format("{} heads, {} of keys, {} x {}{} in {}", heads, kv_heads, queries, keys, causal ? ", causal" : "",
                       c10::toString(type));
  }
};

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const auto type : {at::kDouble, at::kFloat, at::kBFloat16})
    for (const std::int64_t kv_heads : {4, 2, 1}) {
      all.push_back({4, kv_heads, 19, 19, true, type});
      all.push_back({4, kv_heads, 19, 7, false, type});
      all.push_back({4, kv_heads, 1, 33, false, type});
    }
  return all;
}

TEST(AttentionParts, OfAllKeysAreAttention) {
  for (const auto& each : cases()) {
    const auto given = inputs(each.heads, each.kv_heads, each.queries, each.keys, each.type);
    const auto expected = expected_of(given, each.causal);
    const double tolerance = tolerance_of(each.type);
    const auto made = partial_attention(given.q, given.k, given.v, each.causal);
    expect_close(made.out, expected.out, tolerance, each.words());
    expect_close(made.log_sums, expected.log_sums, tolerance, each.words());
    EXPECT_EQ(made.log_sums.scalar_type(), sum_type(each.type));
    const auto d =
        partial_attention_backward(given.d_out, {given.q, given.k, given.v, made.out, made.log_sums}, each.causal);
    expect_close(d.q, expected.d_q, tolerance, each.words());
    expect_close(d.k, expected.d_k, tolerance, each.words());
    expect_close(d.v, expected.d_v, tolerance, each.words());
  }
}

// Devices and types that no library's kernel takes.
TEST(AttentionParts, ByScoresAreTheSame) {
  for (const auto& each : cases())
    for (const std::int64_t most : {std::int64_t{1}, std::int64_t{1} << 20}) {
      const auto given = inputs(each.heads, each.kv_heads, each.queries, each.keys, each.type);
      const auto expected = expected_of(given, each.causal);
      const double tolerance = tolerance_of(each.type);
      const ScoredOptions how{.causal = each.causal, .most_bytes = most};
      const auto made = scored_attention(given.q, given.k, given.v, how);
      expect_close(made.out, expected.out, tolerance, each.words());
      expect_close(made.log_sums, expected.log_sums, tolerance, each.words());
      const auto d = scored_attention_backward(given.d_out, {given.q, given.k, given.v, made.out, made.log_sums}, how);
      expect_close(d.q, expected.d_q, tolerance, each.words());
      expect_close(d.k, expected.d_k, tolerance, each.words());
      expect_close(d.v, expected.d_v, tolerance, each.words());
    }
}

// Of keys one behind the other; the gradients are those of each with the result over all.
TEST(AttentionParts, ComeTogetherByTheirLogSums) {
  for (const auto type : {at::kDouble, at::kFloat, at::kBFloat16}) {
    const auto given = inputs(4, 2, 10, 24, type);
    const auto expected = expected_of(given, false);
    const double tolerance = tolerance_of(type);
    Tensor out, log_sums;
    for (const std::int64_t at : {0, 8, 16}) {
      const auto part = partial_attention(given.q, given.k.narrow(2, at, 8), given.v.narrow(2, at, 8), false);
      if (at == 0) {
        out = part.out.transpose(1, 2).to(sum_type(type)).contiguous();
        log_sums = part.log_sums.clone();
      } else {
        add_part(out, log_sums, part);
      }
    }
    expect_close(out.transpose(1, 2), expected.out, tolerance, c10::toString(type));
    expect_close(log_sums, expected.log_sums, tolerance, c10::toString(type));
    Tensor d_q = at::zeros(given.q.sizes(), sum_type(type));
    for (const std::int64_t at : {0, 8, 16}) {
      const auto d = partial_attention_backward(
          given.d_out, {given.q, given.k.narrow(2, at, 8), given.v.narrow(2, at, 8), out.transpose(1, 2).to(type), log_sums},
          false);
      d_q.add_(d.q);
      expect_close(d.k, expected.d_k.narrow(2, at, 8), tolerance, c10::toString(type));
      expect_close(d.v, expected.d_v.narrow(2, at, 8), tolerance, c10::toString(type));
    }
    expect_close(d_q, expected.d_q, tolerance, c10::toString(type));
  }
}

TEST(AttentionParts, RefuseWhatDoesNotFit) {
  const auto given = inputs(4, 2, 10, 24, at::kDouble);
  testing::expect_part(testing::thrown<Error>([&] { partial_attention(given.q, given.k, given.v, true); }),
                       "partial_attention: 10 queries and 24 keys; allowed of a causal part: as many of both");
  testing::expect_part(testing::thrown<Error>([&] { partial_attention(given.q.narrow(1, 0, 3), given.k, given.v, false); }),
                       "partial_attention: 3 heads of queries, 2 of keys");
}

}  // namespace
}  // namespace bonfire::attention_parts_test
