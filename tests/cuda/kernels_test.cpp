// The CUDA kernels, forward and backward, against torch's operators in double on the CPU. Sizes are odd on purpose: rows
// that fill no pack, rows that several warps share, rows too long for registers.
#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include "bonfire/comm/device.h"
#include "bonfire/kernels/activation.h"
#include "bonfire/kernels/attention.h"
#include "bonfire/kernels/cross_entropy.h"
#include "bonfire/kernels/dropout.h"
#include "bonfire/kernels/embedding.h"
#include "bonfire/kernels/norm.h"
#include "bonfire/kernels/product.h"
#include "bonfire/kernels/qkv.h"
#include "bonfire/kernels/self_attention.h"
#include "bonfire/train/memory.h"
#include "tests/support/extreme_cases.h"
#include "tests/support/gpu_ranks.h"
#include "tests/support/kernel_check.h"

namespace bonfire::kernels_test {
namespace {

using at::Tensor;
using bonfire::testing::expect_follows;
using bonfire::testing::KernelCheck;
using bonfire::testing::Tensors;
using bonfire::testing::tolerance_of;

const c10::Device gpu(c10::kCUDA, 0);

#ifdef BONFIRE_PACKED_ATTENTION
constexpr bool kPackedAttention = true;
#else
constexpr bool kPackedAttention = false;
#endif

class GpuKernels : public ::testing::TestWithParam<at::ScalarType> {
 protected:
  void SetUp() override {
    BONFIRE_SKIP_WITHOUT_GPU();
    at::manual_seed(5);
  }
  static bool narrow() { return c10::elementSize(GetParam()) == 2; }
  static at::ScalarType wide() { return GetParam() == at::kDouble ? at::kDouble : at::kFloat; }
  static KernelCheck check(std::set<std::size_t> kept_fp32 = {}) {
    return {.type = GetParam(), .device = gpu, .kept_fp32 = std::move(kept_fp32)};
  }
};
INSTANTIATE_TEST_SUITE_P(Types, GpuKernels, ::testing::Values(at::kDouble, at::kFloat, at::kBFloat16, at::kHalf),
                         [](const auto& info) { return std::string(c10::toString(info.param)); });

Tensor reference_rms_norm(const Tensor& x, const Tensor& weight) {
  return x / (x * x).mean(-1, true).add(1e-5).sqrt() * weight;
}

Tensors streamed(NormedStream out) { return {out.normed, out.stream}; }

TEST_P(GpuKernels, Norms) {
  for (const std::int64_t columns : {1, 7, 64, 301, 768, 1600, 2048, 4096, 8200, 40000})
    for (const std::int64_t rows : {1, 3, 700}) {
      if (columns > 8000 && rows > 3) continue;
      SCOPED_TRACE(::testing::Message() << rows << " rows of " << columns);
      const Tensor x = at::randn({rows, columns}), residual = at::randn({rows, columns}), weight = at::randn({columns}),
                   bias = at::randn({columns});
      for (const auto& kept : {std::set<std::size_t>{}, std::set<std::size_t>{1, 2}}) {
        if (!kept.empty() && !narrow()) continue;
        expect_follows([](const Tensors& t) { return streamed(rms_norm_stream(t[0], {}, t[1], {})); },
                       [](const Tensors& t) {
                         return Tensors{reference_rms_norm(t[0], t[1]), t[0] * 1};
                       },
                       {x, weight}, check(kept));
        // A layer norm of one element is 0 / 0 but for eps.
        if (columns > 1)
          expect_follows([](const Tensors& t) { return streamed(layer_norm_stream(t[0], t[1], t[2], {})); },
                         [=](const Tensors& t) {
                           return Tensors{at::layer_norm(t[0], {columns}, t[1], t[2], 1e-5), t[0] * 1};
                         },
                         {x, weight, bias}, check(kept));
      }
      expect_follows([](const Tensors& t) { return Tensors{bonfire::rms_norm(t[0], t[1], {})}; },
                     [](const Tensors& t) { return Tensors{reference_rms_norm(t[0], t[1])}; }, {x, weight}, check());
      if (!narrow())  // narrow types round the sum first
        expect_follows([](const Tensors& t) { return streamed(rms_norm_stream(t[0], t[1], t[2], {})); },
                       [](const Tensors& t) {
                         return Tensors{reference_rms_norm(t[0] + t[1], t[2]), t[0] + t[1]};
                       },
                       {x, residual, weight}, check());
    }
}

TEST_P(GpuKernels, NormsOfMemoryThatIsNotAligned) {
  const auto options = at::TensorOptions(gpu).dtype(GetParam());
  const Tensor memory = at::randn({64 * 5 + 1}, options), weight = at::randn({64}, options);
  const Tensor shifted = memory.narrow(0, 1, 64 * 5).view({5, 64});
  const double distance =
      (bonfire::rms_norm(shifted, weight, {}) - bonfire::rms_norm(shifted.clone(), weight, {})).abs().max().item<double>();
  EXPECT_LE(distance, tolerance_of(GetParam()));
}

TEST_P(GpuKernels, Activations) {
  for (const std::int64_t n : {1, 5, 16, 129, 2048, 5000}) {
    expect_follows([](const Tensors& t) { return Tensors{bonfire::swiglu(t[0])}; },
                   [](const Tensors& t) {
                     const auto halves = t[0].chunk(2, -1);
                     return Tensors{at::silu(halves[0]) * halves[1]};
                   },
                   {at::randn({3, 2, 2 * n}) * 3}, check());
    expect_follows([](const Tensors& t) { return Tensors{bonfire::gelu(t[0])}; },
                   [](const Tensors& t) { return Tensors{at::gelu(t[0], "tanh")}; }, {at::randn({3, n}) * 3}, check());
  }
  const Tensor far = at::tensor({-1e4, -100.0, -88.0, 0.0, 88.0, 100.0, 1e4}).to(GetParam());
  const Tensor got = bonfire::swiglu(at::cat({far, at::ones_like(far)}).to(gpu)).cpu().to(at::kDouble);
  EXPECT_TRUE(at::allclose(got, at::silu(far.to(at::kDouble)), tolerance_of(GetParam()), 1e-30)) << got;
  EXPECT_TRUE(at::isnan(bonfire::gelu(at::full({20}, NAN, at::TensorOptions(gpu).dtype(GetParam())))).all().item<bool>());
}

TEST_P(GpuKernels, ActivationsAreRightEverywhere) { bonfire::testing::expect_activations_right_everywhere(check()); }
TEST_P(GpuKernels, IgnoredTargetsGiveNothing) { bonfire::testing::expect_ignored_targets_give_nothing(check()); }
TEST_P(GpuKernels, SumsAreRoundedOnce) {
  if (!narrow()) GTEST_SKIP() << "nothing is narrower than its sums";
  bonfire::testing::expect_sums_are_rounded_once(check());
}

TEST_P(GpuKernels, SplitQkv) {
  for (const std::int64_t size : {6, 64, 128})
    for (const auto& [heads, kv_heads] : {std::pair<std::int64_t, std::int64_t>{4, 2}, {12, 12}, {3, 1}})
      for (const bool rotated : {false, true}) {
        const std::int64_t all = heads + 2 * kv_heads, half = size / 2, sequence = 9;
        QkvLayout layout{.heads = heads, .kv_heads = kv_heads};
        if (rotated) layout.rotary = rotary_table({.positions = 11, .head_dim = size}, at::TensorOptions(gpu).dtype(wide()));
        const auto reference = [=, heads = heads, kv_heads = kv_heads](const Tensors& t) {
          const Tensor parts = t[0].view({2, sequence, all, size}).transpose(1, 2);
          const auto turn = [&](const Tensor& x) {
            if (!rotated) return x * 1;
            const Tensor angle =
                at::outer(at::arange(sequence, at::kDouble),
                          at::pow(10000.0, at::arange(half, at::kDouble) * (-1.0 / static_cast<double>(half))));
            const Tensor c = at::cat({angle.cos(), angle.cos()}, 1), s = at::cat({angle.sin(), angle.sin()}, 1);
            const auto halves = x.chunk(2, -1);
            return x * c + at::cat({-halves[1], halves[0]}, -1) * s;
          };
          return Tensors{turn(parts.narrow(1, 0, heads)), turn(parts.narrow(1, heads, kv_heads)),
                         parts.narrow(1, heads + kv_heads, kv_heads) * 1};
        };
        expect_follows(
            [&](const Tensors& t) {
              auto [q, k, v] = split_qkv(t[0], layout);
              return Tensors{q, k, v};
            },
            reference, {at::randn({2, sequence, all * size})}, check());
      }
}

Tensor reference_attention(const Tensors& t, bool causal) {
  const std::int64_t group = t[0].size(1) / t[1].size(1), sequence = t[0].size(2), size = t[0].size(3);
  const Tensor k = t[1].repeat_interleave(group, 1), v = t[2].repeat_interleave(group, 1);
  Tensor scores = at::matmul(t[0], k.transpose(2, 3)) / std::sqrt(static_cast<double>(size));
  if (causal) scores = scores.masked_fill(at::ones({sequence, sequence}, at::kBool).triu(1), -INFINITY);
  return at::matmul(scores.softmax(-1), v).transpose(1, 2).reshape({t[0].size(0), sequence, -1});
}

TEST_P(GpuKernels, Attention) {
  for (const bool causal : {true, false})
    for (const std::int64_t kv_heads : {1, 2, 4})
      for (const std::int64_t size : {6, 64, 72, 128, 160})
        for (const std::int64_t sequence : {1, 12, 33, 130}) {
          SCOPED_TRACE(::testing::Message() << kv_heads << " of 4 heads, " << sequence << " tokens of " << size);
          expect_follows([=](const Tensors& t) { return Tensors{bonfire::attention(t[0], t[1], t[2], {.causal = causal})}; },
                         [=](const Tensors& t) { return Tensors{reference_attention(t, causal)}; },
                         {at::randn({2, 4, sequence, size}), at::randn({2, kv_heads, sequence, size}),
                          at::randn({2, kv_heads, sequence, size})},
                         check());
        }
}

// A table of all pairs of positions would be 32 times what is read and written.
TEST_P(GpuKernels, AttentionOfGroupsHoldsNoTableOfPairs) {
  if (GetParam() == at::kDouble) GTEST_SKIP() << "torch has no such kernel for double";
  const std::int64_t sequence = 4096;
  const auto random = [&](std::int64_t heads) {
    return at::randn({1, heads, sequence, 32}, at::TensorOptions(gpu).dtype(GetParam())).set_requires_grad(true);
  };
  const Tensor q = random(4), k = random(2), v = random(2);
  const MemoryMeter meter(gpu);
  const Tensor out = bonfire::attention(q, k, v, {});
  out.backward(at::ones_like(out));
  EXPECT_LE(meter.peak(), 4 * sequence * sequence * q.element_size() / 4);
}

// As a model has it: q, k and v are parts of one packed tensor, turned or not, where they lie or elsewhere.
Tensor reference_self_attention(const Tensor& qkv, const QkvLayout& layout, bool causal) {
  const std::int64_t sequence = qkv.size(1), all = layout.heads + 2 * layout.kv_heads;
  const Tensor parts = qkv.view({qkv.size(0), sequence, all, -1}).transpose(1, 2);
  const auto turned = [&](const Tensor& x) {
    if (!layout.rotary.cosine.defined()) return x;
    const auto angles = [&](const Tensor& table) {
      const Tensor half = table.cpu().to(at::kDouble).narrow(0, 0, sequence);
      return at::cat({half, half}, 1);
    };
    const auto halves = x.chunk(2, -1);
    return x * angles(layout.rotary.cosine) + at::cat({-halves[1], halves[0]}, -1) * angles(layout.rotary.sine);
  };
  return reference_attention(
      {turned(parts.narrow(1, 0, layout.heads)), turned(parts.narrow(1, layout.heads, layout.kv_heads)),
       parts.narrow(1, layout.heads + layout.kv_heads, layout.kv_heads)},
      causal);
}

TEST_P(GpuKernels, SelfAttention) {
  const auto options = at::TensorOptions(gpu).dtype(wide());
  struct Shape {
    std::int64_t heads, kv_heads, size, sequence;
  };
  // Few: cuDNN compiles a kernel for most of them.
  for (const auto& [heads, kv_heads, size, sequence] :
       {Shape{1, 1, 6, 7}, {1, 1, 40, 7}, {3, 3, 64, 64}, {4, 2, 64, 129}, {4, 1, 128, 65}, {4, 2, 40, 1}})
    for (const bool rotated : {false, true}) {
      SCOPED_TRACE(::testing::Message() << kv_heads << " of " << heads << " heads, " << sequence << " tokens of " << size
                                        << (rotated ? ", turned" : ""));
      QkvLayout layout{.heads = heads, .kv_heads = kv_heads};
      if (rotated) layout.rotary = rotary_table({.positions = 140, .head_dim = size}, options);
      const bool causal = sequence != 7;
      const Tensor qkv = at::randn({2, sequence, (heads + 2 * kv_heads) * size});
      const auto reference = [&](const Tensors& t) { return Tensors{reference_self_attention(t[0], layout, causal)}; };
      expect_follows([&](const Tensors& t) { return Tensors{self_attention(t[0], layout, {.causal = causal})}; }, reference,
                     {qkv}, check());
      auto in_place = layout;
      in_place.in_place = true;
      expect_follows([&](const Tensors& t) { return Tensors{self_attention(t[0] * 1, in_place, {.causal = causal})}; },
                     reference, {qkv}, check());
    }
}

// As behind GPT-2's product, whose bias asks for the sums of the packed gradient.
TEST_P(GpuKernels, SelfAttentionBehindABias) {
  for (const auto& [heads, kv_heads] : {std::pair<std::int64_t, std::int64_t>{3, 3}, {4, 2}}) {
    const QkvLayout layout{.heads = heads, .kv_heads = kv_heads, .in_place = true};
    const std::int64_t columns = (heads + 2 * kv_heads) * 64;
    expect_follows(
        [&](const Tensors& t) { return Tensors{self_attention(linear(t[0], t[1], {.bias = t[2]}), layout, {})}; },
        [&](const Tensors& t) { return Tensors{reference_self_attention(at::linear(t[0], t[1], t[2]), layout, true)}; },
        {at::randn({2, 65, 48}), at::randn({columns, 48}) / 7, at::randn({columns})}, check());
  }
}

TEST_P(GpuKernels, SelfAttentionOfMemoryThatIsNotAligned) {
  if (!narrow() || !kPackedAttention) GTEST_SKIP() << "torch's kernels read no such memory";
  const auto options = at::TensorOptions(gpu).dtype(GetParam());
  const Tensor memory = at::randn({2 * 65 * 8 * 64 + 1}, options);
  const Tensor shifted = memory.narrow(0, 1, memory.numel() - 1).view({2, 65, 8 * 64}).set_requires_grad(true);
  const Tensor aligned = shifted.detach().clone().set_requires_grad(true);
  const QkvLayout layout{.heads = 4, .kv_heads = 2};
  const Tensor first = self_attention(shifted, layout, {}), second = self_attention(aligned, layout, {});
  EXPECT_TRUE(first.equal(second));
  const Tensor weight = at::randn_like(first);
  for (const Tensor& out : {first, second}) (out * weight).sum().backward();
  EXPECT_LE((shifted.grad() - aligned.grad()).abs().max().item<double>(), tolerance_of(GetParam()));
}

// Not where it may not be, and then nothing that it reads changes; nor does it matter whether a gradient is wanted.
TEST_P(GpuKernels, PackedAttentionIsTaken) {
  using Optional = std::optional<Tensor>;
  using Packed = Tensors(Tensor, const Optional&, const Optional&, std::int64_t, std::int64_t, bool, bool);
  const auto takes = [&](std::int64_t batch, std::int64_t sequence, std::int64_t size) {
    const Tensor qkv = at::randn({batch, sequence, 8 * size}, at::TensorOptions(gpu).dtype(GetParam()));
    return !c10::Dispatcher::singleton()
                .findSchemaOrThrow("bonfire::packed_attention", "")
                .typed<Packed>()
                .call(qkv, {}, {}, 4, 2, true, false)
                .empty();
  };
  EXPECT_EQ(takes(2, 130, 64), narrow() && kPackedAttention);
  EXPECT_FALSE(takes(2, 130, 6));
  EXPECT_FALSE(takes(2, 1, 64));
  EXPECT_FALSE(takes(0, 8, 64));
  at::globalContext().setDeterministicAlgorithms(true, false);
  EXPECT_FALSE(takes(2, 130, 64));
  at::globalContext().setDeterministicAlgorithms(false, false);

  const QkvLayout layout{.heads = 4, .kv_heads = 2};
  const Tensor qkv = at::randn({2, 130, 8 * 64}, at::TensorOptions(gpu).dtype(GetParam())).set_requires_grad(true),
               before = qkv.detach().clone(), out = self_attention(qkv, layout, {});
  out.sum().backward();
  EXPECT_TRUE(qkv.detach().equal(before));
  const double distance = (self_attention(before, layout, {}) - out.detach()).abs().max().item<double>();
  EXPECT_LE(distance, tolerance_of(GetParam()));
}

TEST_P(GpuKernels, Linear) {
  for (const std::int64_t in : {1, 17, 64, 520})
    for (const std::int64_t out : {1, 33, 128, 400}) {
      SCOPED_TRACE(::testing::Message() << in << " to " << out);
      const Tensors inputs{at::randn({2, 13, in}) / std::sqrt(in), at::randn({out, in}), at::randn({out}),
                           at::randn({2, 13, out})};
      for (const bool bias : {false, true})
        for (const bool residual : {false, true}) {
          Tensors given{inputs[0], inputs[1]};
          if (bias) given.push_back(inputs[2]);
          if (residual) given.push_back(inputs[3]);
          expect_follows(
              [=](const Tensors& t) {
                return Tensors{bonfire::linear(
                    t[0], t[1], {.bias = bias ? t[2] : Tensor(), .residual = residual ? t.back() : Tensor()})};
              },
              [=](const Tensors& t) {
                Tensor y = at::linear(t[0], t[1]);
                if (bias) y = y + t[2];
                if (residual) y = y + t.back();
                return Tensors{y};
              },
              given, check());
        }
    }
}

template <class Signature, class... Arguments>
auto call(const char* name, Arguments... arguments) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>().call(arguments...);
}

// Weight gradients go into a buffer of the type that optimizers read, and the next ones are added there without rounding.
TEST_P(GpuKernels, ProductsIntoAWiderBuffer) {
  using Into = void(Tensor, const Tensor&, const Tensor&, bool);
  for (const std::int64_t rows : {1, 40, 256})
    for (const std::int64_t columns : {3, 64, 129})
      for (const std::int64_t depth : {5, 128, 1000}) {
        const auto options = at::TensorOptions(gpu).dtype(GetParam());
        const Tensor dy = at::randn({depth, rows}, options), x = at::randn({depth, columns}, options);
        const Tensor want = at::mm(dy.to(at::kDouble).t(), x.to(at::kDouble));
        Tensor buffer = at::full({rows, columns}, NAN, options.dtype(wide()));
        const double tolerance = (GetParam() == at::kDouble ? 1e-12 : 1e-5) * std::sqrt(static_cast<double>(depth));
        call<Into>("bonfire::product_into_", buffer, dy.t(), x, false);
        EXPECT_LE((buffer.to(at::kDouble) - want).abs().max().item<double>(), tolerance);
        call<Into>("bonfire::product_into_", buffer, dy.t(), x, true);
        EXPECT_LE((buffer.to(at::kDouble) - 2 * want).abs().max().item<double>(), 2 * tolerance);
      }
}

TEST_P(GpuKernels, CrossEntropy) {
  for (const std::int64_t classes : {2, 31, 1000, 4096, 50001})
    for (const bool mean : {false, true}) {
      Tensor target = at::randint(classes, {2, 7}, at::kLong);
      target[0][3] = -100;
      const Tensor on_gpu = target.to(gpu);
      const auto reference = [=](const Tensor& logits) {
        return at::cross_entropy_loss(logits.view({-1, classes}), target.flatten(), {},
                                      mean ? at::Reduction::Mean : at::Reduction::Sum);
      };
      expect_follows([=](const Tensors& t) { return Tensors{bonfire::cross_entropy(t[0], on_gpu, {.mean = mean})}; },
                     [=](const Tensors& t) { return Tensors{reference(t[0])}; }, {at::randn({2, 7, classes}) * 2}, check());
      const auto row_bytes = classes * static_cast<std::int64_t>(c10::elementSize(GetParam()));
      for (const std::int64_t bytes : {100 * row_bytes, 5 * row_bytes})
        expect_follows(
            [=](const Tensors& t) {
              return Tensors{
                  bonfire::linear_cross_entropy(t[0], t[1], on_gpu, {.loss = {.mean = mean}, .most_logit_bytes = bytes})};
            },
            [=](const Tensors& t) { return Tensors{reference(at::linear(t[0], t[1]))}; },
            {at::randn({2, 7, 16}), at::randn({classes, 16}) / 4}, check());
    }
  // More rows than there are multiprocessors, of lengths that fit into the shared memory of one, of two and of four.
  for (const auto& [rows, classes] : {std::pair<std::int64_t, std::int64_t>{300, 30000}, {150, 128256}, {70, 200000}}) {
    SCOPED_TRACE(::testing::Message() << rows << " rows of " << classes);
    Tensor target = at::randint(classes, {rows}, at::kLong);
    target[3] = target[rows - 1] = -100;
    target[4] = 0;
    target[5] = classes - 1;
    const Tensor given = (at::randn({rows, classes}, gpu) * 2).to(GetParam()), on_gpu = target.to(gpu);
    given[6].fill_(-INFINITY);
    given[6][7] = 1;
    on_gpu[6] = 7;
    const Tensor logits = given.detach().clone().set_requires_grad(true);
    const Tensor reference = given.to(at::kDouble).set_requires_grad(true);
    const Tensor loss = bonfire::cross_entropy(logits, on_gpu, {.mean = false});
    const Tensor want = at::cross_entropy_loss(reference, on_gpu, {}, at::Reduction::Sum);
    loss.backward();
    want.backward();
    EXPECT_NEAR(loss.item<double>() / want.item<double>(), 1, 1e-6);
    const Tensor distance = logits.grad().to(at::kDouble) - reference.grad();
    EXPECT_LE((distance.norm() / reference.grad().norm()).item<double>(), tolerance_of(GetParam()));
    const Tensor again = given.detach().clone().set_requires_grad(true);
    bonfire::cross_entropy(again, on_gpu, {.mean = false}).backward();
    EXPECT_TRUE(again.grad().equal(logits.grad()));
  }
  // A target that is no class cannot be reported from a kernel; the loss says so.
  const Tensor logits = at::randn({3, 9}, at::TensorOptions(gpu).dtype(GetParam()));
  EXPECT_TRUE(std::isnan(bonfire::cross_entropy(logits, at::tensor({1, 9, 2}, at::kLong).to(gpu), {}).item<double>()));
}

TEST_P(GpuKernels, EmbeddingGradientsAreExactAndRepeatable) {
  for (const std::int64_t columns : {1, 19, 256, 1000}) {
    const Tensor tokens = at::randint(7, {3, 400}, at::kLong), on_gpu = tokens.to(gpu).flatten();
    const auto options = at::TensorOptions(gpu).dtype(GetParam());
    const Tensor rows = at::randn({1200, columns}, options), before = at::randn({9, columns}, options.dtype(wide()));
    const auto sum = [&] {
      Tensor out = before.clone();
      call<void(Tensor, const Tensor&, const Tensor&)>("bonfire::embedding_add_", out, on_gpu, rows);
      return out;
    };
    const Tensor got = sum();
    const Tensor want = before.to(at::kDouble).index_add(0, on_gpu, rows.to(at::kDouble));
    EXPECT_LE((got.to(at::kDouble) - want).abs().max().item<double>(), GetParam() == at::kDouble ? 1e-12 : 1e-4);
    EXPECT_TRUE(got.equal(sum()));
    if (!narrow())  // narrow sums round at the end
      expect_follows([&](const Tensors& t) { return Tensors{bonfire::embedding(t[0], on_gpu)}; },
                     [&](const Tensors& t) { return Tensors{at::embedding(t[0], tokens.flatten())}; },
                     {at::randn({9, columns}) / 8}, check());
  }
}

// Tokens that are everywhere, by themselves, among others, and ending where pieces of their sums do.
TEST_P(GpuKernels, EmbeddingGradientsOfHotTokens) {
  for (const std::int64_t columns : {1, 96, 1000}) {
    const auto options = at::TensorOptions(gpu).dtype(GetParam());
    for (const std::int64_t hot : {1, 63, 64, 65, 127, 128, 200, 4000}) {
      const Tensor others = at::randint(9, {731}, at::kLong);
      const Tensor all = at::cat({others, at::full({hot}, 4, at::kLong)});
      const Tensor tokens = all.index_select(0, at::randperm(all.numel(), at::kLong)).to(gpu);
      const Tensor rows = at::randn({tokens.numel(), columns}, options),
                   before = at::randn({9, columns}, options.dtype(wide()));
      const auto sum = [&] {
        Tensor out = before.clone();
        call<void(Tensor, const Tensor&, const Tensor&)>("bonfire::embedding_add_", out, tokens, rows);
        return out;
      };
      const Tensor got = sum(), want = before.to(at::kDouble).index_add(0, tokens, rows.to(at::kDouble));
      const double error = (got.to(at::kDouble) - want).abs().max().item<double>();
      EXPECT_LE(error, GetParam() == at::kDouble ? 1e-12 : 2e-4) << hot << " times in rows of " << columns;
      EXPECT_TRUE(got.equal(sum()));
    }
    // All the same, with nothing before and nothing behind.
    for (const std::int64_t count : {1, 64, 65, 128, 1000}) {
      const Tensor rows = at::randn({count, columns}, options);
      Tensor out = at::zeros({2, columns}, options.dtype(wide()));
      call<void(Tensor, const Tensor&, const Tensor&)>("bonfire::embedding_add_", out,
                                                       at::ones({count}, options.dtype(at::kLong)), rows);
      EXPECT_LE((out[1].to(at::kDouble) - rows.to(at::kDouble).sum(0)).abs().max().item<double>(),
                GetParam() == at::kDouble ? 1e-12 : 1e-4)
          << count << " alike in rows of " << columns;
      EXPECT_EQ(out[0].abs().max().item<double>(), 0);
    }
  }
}

TEST_P(GpuKernels, DropoutDropsWhatTheCpuDrops) {
  for (const std::int64_t first : {0, 1, 4, 333}) {
    const Tensor x = at::randn({1000}).to(GetParam());
    const DropoutOptions options{.p = 0.3, .random = Random(9).fork("region"), .first = first};
    EXPECT_TRUE(bonfire::dropout(x.to(gpu), options).cpu().equal(bonfire::dropout(x, options)));
  }
}

// The sums over rows have one order.
TEST_P(GpuKernels, EqualRunsGiveEqualBits) {
  const auto options = at::TensorOptions(gpu).dtype(GetParam());
  const Tensor x = at::randn({3000, 768}, options), weight = at::randn({768}, options), bias = at::randn({768}, options),
               dy = at::randn({3000, 768}, options);
  const auto gradients = [&] {
    Tensors out;
    for (const bool centered : {false, true}) {
      Tensors inputs;
      for (const Tensor& t : {x, weight, bias}) inputs.push_back(t.detach().clone().set_requires_grad(true));
      const Tensor y =
          centered ? bonfire::layer_norm(inputs[0], inputs[1], inputs[2], {}) : bonfire::rms_norm(inputs[0], inputs[1], {});
      y.backward(dy);
      out.insert(out.end(), {inputs[0].grad(), inputs[1].grad()});
    }
    return out;
  };
  const Tensors first = gradients();
  for (int repeat = 0; repeat < 3; ++repeat) {
    const Tensors again = gradients();
    for (std::size_t i = 0; i < first.size(); ++i) EXPECT_TRUE(first[i].equal(again[i])) << i;
  }
}

}  // namespace
}  // namespace bonfire::kernels_test
