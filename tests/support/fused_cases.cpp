#include "tests/support/fused_cases.h"

#include <gtest/gtest.h>

#include "bonfire/kernels/qkv.h"
#include "tests/support/feed.h"

namespace bonfire::testing {

// Products whose results are read in all the ways in which sums of their gradients are made on the way: by norms, an
// activation and the cutting of q, k and v.
namespace {

constexpr std::int64_t chain_dim = 24;

Tensors chain_inputs() {
  const auto weight = [](std::int64_t out) { return at::randn({out, chain_dim}) / 5; };
  const auto vector = [](std::int64_t n) { return at::randn({n}); };
  constexpr std::int64_t d = chain_dim;
  return {at::randn({2, 19, d}),
          weight(d),
          vector(d),
          vector(d),
          vector(d),
          weight(d),
          vector(d),
          weight(d),
          vector(d),
          vector(d),
          vector(d),
          weight(2 * d),
          vector(2 * d),
          weight(d),
          vector(d)};
}

Tensors chain(const Tensors& t) {
  const Tensor first = bonfire::linear(t[0], t[1], {.bias = t[2]});
  const Tensor second = feed_forward(first, {.norm = {.weight = t[3], .bias = t[4]},
                                             .up = t[5],
                                             .up_options = {.bias = t[6]},
                                             .activation = Activation::gelu,
                                             .down = t[7],
                                             .down_options = {.bias = t[8]}})
                            .out;
  const auto [qkv, rest] = normed_linear(second, {.weight = t[9], .bias = t[10]}, t[11], {.bias = t[12]});
  const auto [q, k, v] = split_qkv(qkv, {.heads = 4, .kv_heads = 2});
  const Tensor third = bonfire::linear(rest, t[13], {.bias = t[14]});
  return {q, k, v, bonfire::layer_norm(third, t[3], t[4], {})};
}

Tensors chain_reference(const Tensors& t) {
  const Tensor first = at::linear(t[0], t[1], t[2]);
  const Tensor wide = at::linear(normed(first, t[3], t[4]), t[5], t[6]);
  const Tensor second = at::linear(activated(wide, Activation::gelu), t[7], t[8]) + first;
  const Tensor qkv = at::linear(normed(second, t[9], t[10]), t[11], t[12]);
  const Tensor heads = qkv.view({2, 19, 8, -1}).transpose(1, 2);
  return {heads.narrow(1, 0, 4), heads.narrow(1, 4, 2), heads.narrow(1, 6, 2),
          normed(at::linear(second, t[13], t[14]), t[3], t[4])};
}

}  // namespace

void expect_bias_gradients_follow(const KernelCheck& check) {
  if (c10::elementSize(check.type) > 2) expect_follows(chain, chain_reference, chain_inputs(), check);

  const auto options = at::TensorOptions(check.device).dtype(check.type);
  const auto wide = check.type == at::kDouble ? at::kDouble : at::kFloat;
  const double tolerance = check.type == at::kDouble ? 1e-13 : 1e-5;
  const auto expect_sums = [&](const Tensor& sums, const Tensor& of) {
    EXPECT_EQ(sums.scalar_type(), wide);
    const Tensor all = of.to(at::kDouble).flatten(0, -2), want = all.sum(0);
    EXPECT_LE((sums.to(at::kDouble) - want).abs().max().item<double>(), tolerance * all.abs().sum(0).max().item<double>());
  };
  using Forward = std::tuple<Tensor, Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, double);
  using Backward = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>(const Tensor&, const std::optional<Tensor>&,
                                                                      const Tensor&, const Tensor&, const Tensor&,
                                                                      const Tensor&, const std::optional<Tensor>&, bool);
  for (const std::int64_t columns : {3, 40, 768, 1600, 4096, 8200})
    for (const std::int64_t rows : {1, 700}) {
      SCOPED_TRACE(::testing::Message() << rows << " rows of " << columns);
      const auto random = [&] { return at::randn({rows, columns}, options); };
      const Tensor x = random(), weight = at::randn({columns}, options);
      const auto forward = call<Forward>("bonfire::layer_norm", x, weight, weight, 1e-5);
      const auto out = call<Backward>("bonfire::layer_norm_backward", random(), random(), x, weight, std::get<1>(forward),
                                      std::get<2>(forward), std::nullopt, true);
      expect_sums(std::get<4>(out), std::get<0>(out));
    }
  using Merge =
      Tensor(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, const std::optional<Tensor>&);
  using MergeSums = std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&);
  for (const std::int64_t size : {3, 64})
    for (const std::int64_t sequence : {1, 217}) {
      const Tensor q = at::randn({3, sequence, 4, size}, options).transpose(1, 2),
                   k = at::randn({3, 2, sequence, size}, options),
                   v = at::randn({3, sequence, 2, size}, options).transpose(1, 2);
      const auto [qkv, sums] = call<MergeSums>("bonfire::merge_qkv_sums", q, k, v);
      EXPECT_TRUE(qkv.equal(call<Merge>("bonfire::merge_qkv", q, k, v, std::nullopt, std::nullopt)));
      expect_sums(sums, qkv);
    }
}

void expect_fused_products_follow(const KernelCheck& check) {
  const bool narrow = c10::elementSize(check.type) == 2;
  for (const Feed& feed : feeds()) {
    SCOPED_TRACE(name(feed));
    const auto all = feed.inputs();
    // One after the other, narrow types round more often than one result's tolerance allows.
    if (!narrow)
      expect_follows([&](const Tensors& t) { return feed.fused(t); }, [&](const Tensors& t) { return feed.reference(t); },
                     all, check);
    const auto bias = [&](const Tensors& t, std::size_t at) { return feed.biased ? t[at] : Tensor(); };
    Tensors first{all[0], all[3], all[1]};
    if (feed.biased) first.push_back(all[4]);
    if (feed.centered) first.push_back(all[2]);
    expect_follows(
        [&](const Tensors& t) {
          const auto out =
              normed_linear(t[0], {.weight = t[2], .bias = feed.centered ? t.back() : Tensor()}, t[1], {.bias = bias(t, 3)});
          return Tensors{out.out, out.stream};
        },
        [&](const Tensors& t) {
          Tensor out = at::linear(normed(t[0], t[2], feed.centered ? t.back() : Tensor()), t[1]);
          return Tensors{feed.biased ? out + t[3] : out, t[0] * 1};
        },
        first, check);
    // Without a norm, and with the stream apart from the result: products in a row round as often as those of a norm's.
    if (narrow) continue;
    expect_follows(
        [&](const Tensors& t) {
          auto parts = feed.all(t);
          parts.norm = {};
          parts.residual = false;
          const auto [out, stream] = feed_forward(t[0], parts);
          return Tensors{out + feed.unused(t) + (t[1] * 0).sum() + (t[2] * 0).sum(), stream};
        },
        [&](const Tensors& t) {
          const auto bias = [&](std::size_t at) { return feed.biased ? t[at] : t[at] * 0; };
          const Tensor wide = at::linear(t[0], t[3]) + bias(4);
          return Tensors{at::linear(activated(wide, feed.activation), t[5]) + bias(6) + (t[1] * 0).sum() + (t[2] * 0).sum(),
                         t[0] * 1};
        },
        all, check);
  }
  for (const auto& [rows, columns] : {std::pair<std::int64_t, std::int64_t>{1, 1}, {3, 40}, {1000, 33}, {777, 264}}) {
    const Tensor x = at::randn({rows, columns}).to(check.device, check.type);
    const Tensor wide = x.to(at::kDouble), off = (column_sums(x).to(at::kDouble) - wide.sum(0)).abs();
    EXPECT_LE((off / wide.abs().sum(0)).max().item<double>(), check.type == at::kDouble ? 1e-15 : 1e-6);
  }
}

void expect_fused_products_equal_their_parts(const KernelCheck& check) {
  auto all = feeds();
  for (std::size_t i = 0, count = all.size(); i < count; ++i) {
    all.push_back(all[i]);
    all.back().keep = true;
  }
  for (const Feed& feed : all) {
    SCOPED_TRACE(name(feed));
    const auto given = feed.inputs();
    const Tensors first = on(check, given), second = on(check, given);
    const Tensors together = feed.fused(first), apart = feed.parts(second);
    EXPECT_TRUE(together[0].equal(apart[0]));
    const Tensor weight = at::randn_like(together[0]);
    const auto a = gradients_of(together, first, weight), b = gradients_of(apart, second, weight);
    for (std::size_t i = 0; i < a.size(); ++i) {
      const double error = (a[i] - b[i]).abs().max().item<double>();
      const bool summed = i == 4 && feed.activation == Activation::gelu;  // in another order
      if (!summed)
        EXPECT_TRUE(a[i].equal(b[i])) << i << ", by " << error;
      else
        EXPECT_LE(error, tolerance_of(check.type) * (1 + b[i].abs().max().item<double>())) << i;
    }
  }
}

void expect_freezing_changes_nothing_else(const KernelCheck& check) {
  const Feed feed{Activation::gelu, true, true, 20, 32, 48};
  const auto given = feed.inputs();
  const Tensors all = on(check, given);
  const Tensors out = feed.fused(all);
  const Tensor weight = at::randn_like(out[0]);
  const auto want = gradients_of(out, all, weight);
  for (std::size_t trained = 0; trained < given.size(); ++trained) {
    Tensors some = on(check, given);
    for (std::size_t i = 0; i < some.size(); ++i) some[i].set_requires_grad(i == trained);
    const auto got = gradients_of(feed.fused(some), some, weight);
    for (std::size_t i = 0; i < some.size(); ++i) EXPECT_EQ(got[i].defined(), i == trained) << i << " of " << trained;
    const double error = (got[trained] - want[trained]).abs().max().item<double>();
    EXPECT_LE(error, tolerance_of(check.type) * (1 + want[trained].abs().max().item<double>())) << trained;
  }
}

}  // namespace bonfire::testing
