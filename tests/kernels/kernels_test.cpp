#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include "bonfire/base/error.h"
#include "bonfire/kernels/activation.h"
#include "bonfire/kernels/attention.h"
#include "bonfire/kernels/cross_entropy.h"
#include "bonfire/kernels/dropout.h"
#include "bonfire/kernels/embedding.h"
#include "bonfire/kernels/gemm.h"
#include "bonfire/kernels/norm.h"
#include "bonfire/kernels/product.h"
#include "bonfire/kernels/qkv.h"
#include "bonfire/kernels/self_attention.h"
#include "tests/support/kernel_check.h"

// Each kernel, forward and backward, against the same function of torch's operators in double.
namespace bonfire::kernels_test {
namespace {

using at::Tensor;
using bonfire::testing::expect_follows;
using bonfire::testing::Function;
using bonfire::testing::Tensors;

constexpr at::ScalarType kTypes[] = {at::kDouble, at::kFloat, at::kBFloat16, at::kHalf};

void expect_equal(const Function& ours, const Function& reference, const Tensors& given, at::ScalarType type) {
  expect_follows(ours, reference, given, {.type = type});
}

class Kernels : public ::testing::TestWithParam<at::ScalarType> {
 protected:
  void SetUp() override {
    at::manual_seed(5);
    at::set_num_threads(1);
  }
};
INSTANTIATE_TEST_SUITE_P(Types, Kernels, ::testing::ValuesIn(kTypes),
                         [](const auto& info) { return std::string(c10::toString(info.param)); });

Tensor reference_rms_norm(const Tensor& x, const Tensor& weight) {
  return x / (x * x).mean(-1, true).add(1e-5).sqrt() * weight;
}

TEST_P(Kernels, RmsNorm) {
  for (const std::int64_t columns : {1, 7, 64, 301})
    for (const std::int64_t rows : {1, 3, 700}) {
      const Tensors inputs{at::randn({rows, columns}), at::randn({rows, columns}), at::randn({columns})};
      expect_equal([](const Tensors& t) { return Tensors{bonfire::rms_norm(t[0], t[1], {})}; },
                   [](const Tensors& t) { return Tensors{reference_rms_norm(t[0], t[1])}; }, {inputs[0], inputs[2]},
                   GetParam());
      expect_equal(
          [](const Tensors& t) {
            auto [normed, stream] = rms_norm_stream(t[0], {}, t[1], {});
            return Tensors{normed, stream};
          },
          [](const Tensors& t) {
            return Tensors{reference_rms_norm(t[0], t[1]), t[0] * 1};
          },
          {inputs[0], inputs[2]}, GetParam());
      expect_equal(
          [](const Tensors& t) {
            auto [normed, stream] = rms_norm_stream(t[0], t[1], t[2], {});
            return Tensors{normed, stream};
          },
          [](const Tensors& t) {
            return Tensors{reference_rms_norm(t[0] + t[1], t[2]), t[0] + t[1]};
          },
          inputs, GetParam());
    }
}

// Weights that stay in fp32 are used as they are: rounding them would cost more than fp32's tolerance.
TEST(Norms, TakeAWeightInFp32BesideNarrowInputs) {
  at::manual_seed(5);
  for (const auto type : {at::kBFloat16, at::kHalf}) {
    const Tensor x = at::randn({9, 40}), weight = at::randn({40}), bias = at::randn({40});
    expect_follows(
        [](const Tensors& t) {
          auto [normed, stream] = rms_norm_stream(t[0], {}, t[1], {});
          return Tensors{normed, stream};
        },
        [](const Tensors& t) {
          return Tensors{reference_rms_norm(t[0], t[1]), t[0] * 1};
        },
        {x, weight}, {.type = type, .kept_fp32 = {1}});
    expect_follows(
        [](const Tensors& t) {
          auto [normed, stream] = layer_norm_stream(t[0], t[1], t[2], {});
          return Tensors{normed, stream};
        },
        [](const Tensors& t) {
          return Tensors{at::layer_norm(t[0], {40}, t[1], t[2], 1e-5), t[0] * 1};
        },
        {x, weight, bias}, {.type = type, .kept_fp32 = {1, 2}});
    // One row whose norm is exact: what is left is the rounding of the result, so the weight was not rounded before.
    const Tensor ones = at::ones({1, 40}, type), exact = bonfire::rms_norm(ones, weight, {.eps = 0});
    EXPECT_TRUE(exact.equal(weight.view({1, 40}).to(type)));
  }
}

TEST_P(Kernels, LayerNorm) {
  for (const std::int64_t columns : {7, 64, 301})  // of two, the variance is mostly cancellation
    for (const std::int64_t rows : {1, 3, 700}) {
      const auto reference = [=](const Tensors& t) { return at::layer_norm(t[0], {columns}, t[1], t[2], 1e-5); };
      const Tensors inputs{at::randn({rows, columns}) + 3, at::randn({columns}), at::randn({columns})};
      expect_equal(
          [](const Tensors& t) {
            auto [normed, stream] = layer_norm_stream(t[0], t[1], t[2], {});
            return Tensors{normed, stream};
          },
          [=](const Tensors& t) {
            return Tensors{reference(t), t[0] * 1};
          },
          inputs, GetParam());
      expect_equal([](const Tensors& t) { return Tensors{bonfire::layer_norm(t[0], t[1], t[2], {})}; },
                   [=](const Tensors& t) { return Tensors{reference(t)}; }, inputs, GetParam());
    }
}

TEST_P(Kernels, Activations) {
  for (const std::int64_t n : {1, 5, 16, 129}) {
    expect_equal([](const Tensors& t) { return Tensors{bonfire::swiglu(t[0])}; },
                 [](const Tensors& t) {
                   const auto halves = t[0].chunk(2, -1);
                   return Tensors{at::silu(halves[0]) * halves[1]};
                 },
                 {at::randn({3, 2, 2 * n}) * 3}, GetParam());
    expect_equal([](const Tensors& t) { return Tensors{bonfire::gelu(t[0])}; },
                 [](const Tensors& t) { return Tensors{at::gelu(t[0], "tanh")}; }, {at::randn({3, n}) * 3}, GetParam());
  }
}

TEST(Activations, AreRightFarFromZero) {
  const Tensor x = at::tensor({-1e4f, -100.f, -88.f, -87.f, -20.f, 20.f, 87.f, 88.5f, 100.f, 1e4f});
  const Tensor expected = at::silu(x.to(at::kDouble));
  const Tensor actual = bonfire::swiglu(at::cat({x, at::ones_like(x)})).to(at::kDouble);
  EXPECT_LE(((actual - expected).abs() / expected.abs().clamp_min(1)).max().item<double>(), 1e-6);
  EXPECT_TRUE(at::isnan(bonfire::gelu(at::full({20}, NAN))).all().item<bool>());
}

TEST_P(Kernels, SplitQkv) {
  const QkvLayout plain{.heads = 4, .kv_heads = 2};
  for (const bool rotated : {false, true}) {
    QkvLayout layout = plain;
    const auto type = GetParam() == at::kDouble ? at::kDouble : at::kFloat;
    if (rotated) layout.rotary = rotary_table({.positions = 11, .head_dim = 6}, at::TensorOptions(type));
    const auto reference = [&](const Tensors& t) {
      const Tensor all = t[0].view({2, 9, 8, 6}).transpose(1, 2);
      const auto turn = [&](const Tensor& x) {
        if (!rotated) return x * 1;
        const Tensor angle =
            at::outer(at::arange(9, at::kDouble), at::pow(10000.0, at::arange(3, at::kDouble) * (-2.0 / 6)));
        const Tensor c = at::cat({angle.cos(), angle.cos()}, 1), s = at::cat({angle.sin(), angle.sin()}, 1);
        const auto halves = x.chunk(2, -1);
        return x * c + at::cat({-halves[1], halves[0]}, -1) * s;
      };
      return Tensors{turn(all.narrow(1, 0, 4)), turn(all.narrow(1, 4, 2)), all.narrow(1, 6, 2) * 1};
    };
    const auto ours = [&](const Tensors& t) {
      auto [q, k, v] = split_qkv(t[0], layout);
      return Tensors{q, k, v};
    };
    expect_equal(ours, reference, {at::randn({2, 9, 48})}, GetParam());
  }
}

TEST_P(Kernels, SelfAttentionIsThatOfTheThreeApart) {
  const auto type = GetParam() == at::kDouble ? at::kDouble : at::kFloat;
  QkvLayout layout{.heads = 4, .kv_heads = 2};
  layout.rotary = rotary_table({.positions = 11, .head_dim = 6}, at::TensorOptions(type));
  const Tensor first = at::randn({2, 9, 48}).to(GetParam()).set_requires_grad(true),
               second = first.detach().clone().set_requires_grad(true);
  const auto [q, k, v] = split_qkv(first, layout);
  const Tensor apart = bonfire::attention(q, k, v, {}), together = self_attention(second, layout, {});
  EXPECT_TRUE(together.equal(apart));
  const Tensor weight = at::randn_like(apart);
  (apart * weight).sum().backward();
  (together * weight).sum().backward();
  EXPECT_TRUE(second.grad().equal(first.grad()));
  EXPECT_THROW(self_attention(first.detach().narrow(2, 0, 47), layout, {}), Error);
}

// What an operator takes from the outside of attention's gradient is what its rows sum to.
TEST(SelfAttention, SumsOfItsGradient) {
  using Sums = Tensor(const Tensor&, const Tensor&, std::int64_t, std::int64_t);
  for (const std::int64_t kv_heads : {1, 2, 4})
    for (const bool causal : {true, false}) {
      const Tensor qkv = at::randn({3, 9, (4 + 2 * kv_heads) * 6}, at::kDouble).set_requires_grad(true);
      const Tensor out = self_attention(qkv, {.heads = 4, .kv_heads = kv_heads}, {.causal = causal});
      const Tensor d_out = at::randn_like(out);
      out.backward(d_out);
      const Tensor sums = c10::Dispatcher::singleton()
                              .findSchemaOrThrow("bonfire::packed_attention_sums", "")
                              .typed<Sums>()
                              .call(qkv.grad(), d_out, 4, kv_heads);
      EXPECT_TRUE(at::allclose(sums, qkv.grad().flatten(0, 1).sum(0), 1e-12, 1e-12));
    }
}

TEST_P(Kernels, Attention) {
  for (const bool causal : {true, false})
    for (const std::int64_t kv_heads : {1, 2, 4})
      for (const std::int64_t size : {1, 6, 32, 72})
        for (const std::int64_t sequence : {1, 12, 33, 130}) {
          const auto reference = [=](const Tensors& t) {
            const Tensor k = t[1].repeat_interleave(4 / kv_heads, 1), v = t[2].repeat_interleave(4 / kv_heads, 1);
            Tensor scores = at::matmul(t[0], k.transpose(2, 3)) / std::sqrt(static_cast<double>(size));
            if (causal) {
              const Tensor hidden = at::ones({sequence, sequence}, at::kBool).triu(1);
              scores = scores.masked_fill(hidden, -INFINITY);
            }
            return Tensors{at::matmul(scores.softmax(-1), v).transpose(1, 2).reshape({2, sequence, 4 * size})};
          };
          expect_equal([=](const Tensors& t) { return Tensors{bonfire::attention(t[0], t[1], t[2], {.causal = causal})}; },
                       reference,
                       {at::randn({2, 4, sequence, size}), at::randn({2, kv_heads, sequence, size}),
                        at::randn({2, kv_heads, sequence, size})},
                       GetParam());
        }
}

TEST_P(Kernels, Linear) {
  for (const std::int64_t in : {1, 17, 520})
    for (const std::int64_t out : {1, 33, 400}) {
      const Tensors inputs{at::randn({2, 13, in}), at::randn({out, in}) / std::sqrt(in), at::randn({out}),
                           at::randn({2, 13, out})};
      const auto ours = [](bool bias, bool residual) {
        return [=](const Tensors& t) {
          return Tensors{
              bonfire::linear(t[0], t[1], {.bias = bias ? t[2] : Tensor(), .residual = residual ? t.back() : Tensor()})};
        };
      };
      expect_equal(
          ours(false, false), [](const Tensors& t) { return Tensors{at::linear(t[0], t[1])}; }, {inputs[0], inputs[1]},
          GetParam());
      expect_equal(
          ours(true, false), [](const Tensors& t) { return Tensors{at::linear(t[0], t[1], t[2])}; },
          {inputs[0], inputs[1], inputs[2]}, GetParam());
      expect_equal(
          ours(false, true), [](const Tensors& t) { return Tensors{at::linear(t[0], t[1]) + t[2]}; },
          {inputs[0], inputs[1], inputs[3]}, GetParam());
      expect_equal(
          ours(true, true), [](const Tensors& t) { return Tensors{at::linear(t[0], t[1], t[2]) + t[3]}; }, inputs,
          GetParam());
    }
}

TEST_P(Kernels, CrossEntropy) {
  for (const std::int64_t classes : {2, 31, 1000})
    for (const bool mean : {false, true}) {
      const auto row_bytes = classes * static_cast<std::int64_t>(c10::elementSize(GetParam()));
      Tensor target = at::randint(classes, {2, 7}, at::kLong);
      target[0][3] = -100;
      const auto reference = [=](const Tensor& logits) {
        return at::cross_entropy_loss(logits.view({-1, classes}), target.flatten(), {},
                                      mean ? at::Reduction::Mean : at::Reduction::Sum);
      };
      expect_equal([=](const Tensors& t) { return Tensors{bonfire::cross_entropy(t[0], target, {.mean = mean})}; },
                   [=](const Tensors& t) { return Tensors{reference(t[0])}; }, {at::randn({2, 7, classes}) * 2}, GetParam());
      if (GetParam() == at::kDouble || GetParam() == at::kFloat)  // narrow types round the logits
        expect_equal(
            [=](const Tensors& t) {
              return Tensors{bonfire::linear_cross_entropy(t[0], t[1], target, {.loss = {.mean = mean}})};
            },
            [=](const Tensors& t) { return Tensors{reference(at::linear(t[0], t[1]))}; },
            {at::randn({2, 7, 12}), at::randn({classes, 12})}, GetParam());
      // Chunks of five, of one and of no row's worth of memory.
      for (const auto bytes : {5 * row_bytes, row_bytes, std::int64_t{1}})
        expect_equal(
            [=](const Tensors& t) {
              return Tensors{
                  bonfire::linear_cross_entropy(t[0], t[1], target, {.loss = {.mean = mean}, .most_logit_bytes = bytes})};
            },
            [=](const Tensors& t) { return Tensors{reference(at::linear(t[0], t[1]))}; },
            {at::randn({2, 7, 12}), at::randn({classes, 12}) / 4}, GetParam());
    }
}

TEST(CrossEntropy, SurvivesLargeLogitsAndRefusesWrongTargets) {
  const Tensor logits = at::tensor({1e30f, 0.f, -1e30f, 5.f}).view({1, 4});
  EXPECT_EQ(bonfire::cross_entropy(logits, at::tensor({0}, at::kLong), {}).item<float>(), 0);
  EXPECT_THROW(bonfire::cross_entropy(logits, at::tensor({4}, at::kLong), {}), Error);
  EXPECT_THROW(bonfire::cross_entropy(logits, at::tensor({-1}, at::kLong), {}), Error);
}

TEST_P(Kernels, Embedding) {
  const Tensor tokens = at::randint(5, {3, 40}, at::kLong);  // each row many times
  expect_equal([&](const Tensors& t) { return Tensors{bonfire::embedding(t[0], tokens)}; },
               [&](const Tensors& t) { return Tensors{at::embedding(t[0], tokens)}; }, {at::randn({6, 19})}, GetParam());
  EXPECT_THROW(bonfire::embedding(at::randn({6, 19}), at::full({1}, 6, at::kLong)), Error);
}

TEST(Dropout, DropsByTheGeneratorAndNothingElse) {
  const Random random = Random(9).fork("region");
  const Tensor x = at::rand({1000}).add(1).set_requires_grad(true);
  const Tensor y = bonfire::dropout(x, {.p = 0.3, .random = random});
  y.sum().backward();
  for (std::int64_t i = 0; i < 1000; ++i) {
    const auto word = random.block(static_cast<std::uint64_t>(i) / 4)[static_cast<std::size_t>(i % 4)];
    const float scale = word < 0.3 * 0x1p32 ? 0.f : 1 / 0.7f;
    EXPECT_FLOAT_EQ(y[i].item<float>(), x[i].item<float>() * scale);
    EXPECT_FLOAT_EQ(x.grad()[i].item<float>(), scale);
  }
  // A slice of the batch drops what the batch drops.
  const Tensor slice = bonfire::dropout(x.detach().narrow(0, 333, 444), {.p = 0.3, .random = random, .first = 333});
  EXPECT_TRUE(slice.equal(y.detach().narrow(0, 333, 444)));
}

TEST(Gemm, EqualsTorchForEveryLayoutAndSize) {
  if (!cpu::can_multiply()) GTEST_SKIP() << "this machine has no AVX-512";
  at::manual_seed(1);
  for (const std::int64_t rows : {1, 11, 12, 50, 97})
    for (const std::int64_t columns : {1, 15, 16, 33, 400})
      for (const std::int64_t depth : {1, 3, 64, 513}) {
        const bool turn_a = (rows + depth) % 2, turn_b = columns % 2;
        const Tensor a = turn_a ? at::randn({depth, rows}).t() : at::randn({rows, depth});
        const Tensor b = turn_b ? at::randn({columns, depth}).t() : at::randn({depth, columns});
        Tensor addend = at::randn({rows, columns}), row = at::randn({columns});
        const Tensor expected = at::mm(a.to(at::kDouble), b.to(at::kDouble));
        const auto check = [&](const float* extra, std::int64_t stride, Tensor out, const Tensor& wanted) {
          cpu::multiply({.rows = rows,
                         .columns = columns,
                         .depth = depth,
                         .a = a.const_data_ptr<float>(),
                         .a_row = a.stride(0),
                         .a_column = a.stride(1),
                         .b = b.const_data_ptr<float>(),
                         .b_row = b.stride(0),
                         .b_column = b.stride(1),
                         .c = out.data_ptr<float>(),
                         .c_row = columns,
                         .addend = extra,
                         .addend_row = stride});
          EXPECT_LE((out.to(at::kDouble) - wanted).abs().max().item<double>(), 4e-7 * static_cast<double>(depth) + 1e-6)
              << rows << " " << columns << " " << depth;
        };
        check(nullptr, 0, at::full({rows, columns}, NAN), expected);
        check(row.const_data_ptr<float>(), 0, at::full({rows, columns}, NAN), expected + row);
        const Tensor before = addend.to(at::kDouble).clone();
        check(addend.const_data_ptr<float>(), columns, addend, expected + before);
      }
}

TEST(Backward, TwiceThroughOneGraphIsAnError) {
  const Tensor x = at::randn({4}).set_requires_grad(true);
  const Tensor y = bonfire::gelu(x).sum();
  y.backward();
  EXPECT_ANY_THROW(y.backward());
}

}  // namespace
}  // namespace bonfire::kernels_test
