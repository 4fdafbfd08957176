// Models whose blocks are recomputed, in full or in part: the same bits, and what is kept for backward.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <fmt/format.h>

#include "bonfire/kernels/gemm.h"
#include "bonfire/models/model.h"
#include "bonfire/models/precision.h"
#include "bonfire/plan/activation_bytes.h"
#include "bonfire/plan/step_events.h"
#include "tests/support/rank_memory.h"
#include "tests/support/ranks.h"

namespace bonfire::recompute_test {
namespace {

using at::Tensor;
using plan::ModelSpec;
using plan::ModelType;
using plan::Recompute;

struct Named {
  const char* name;
  ModelSpec spec;
};
std::vector<Named> specs() {
  const ModelSpec llama{
      .type = ModelType::llama, .dim = 32, .layers = 4, .heads = 4, .kv_heads = 2, .ffn = 40, .vocab = 64, .positions = 16};
  auto gpt2 = llama;
  gpt2.type = ModelType::gpt2, gpt2.kv_heads = 0, gpt2.ffn = 128, gpt2.tied = true, gpt2.dropout = 0.2;
  auto mlp = llama;
  mlp.type = ModelType::mlp, mlp.kv_heads = 0, mlp.ffn = 96;
  return {
      {"llama", llama},
      {"gpt2 with dropout", gpt2},
      {"mlp", mlp},
      {"vgg", {.type = ModelType::vgg, .ffn = 12, .classes = 5, .image = 8, .pool = 2, .convolutions = {4, 0, 6, 6, 0}}}};
}

std::pair<Tensor, Tensor> data_of(const ModelSpec& spec, at::ScalarType type, std::int64_t samples = 3) {
  if (spec.type == ModelType::vgg)
    return {at::arange(samples * 3 * 64, at::kDouble).sin().view({samples, 3, 8, 8}).to(type),
            at::arange(samples).remainder(5)};
  const auto tokens = at::arange(samples * 17).mul(7).remainder(61).view({samples, 17});
  return {tokens.narrow(1, 0, 16).contiguous(), tokens.narrow(1, 1, 16).contiguous()};
}

struct Case {
  Recompute what = Recompute::none;
  std::int64_t every = 1;
  plan::Kept kept = plan::Kept::least;
};

std::shared_ptr<Model> model_of(const ModelSpec& spec, const Case& how, at::ScalarType type, const TensorRanks& ranks = {}) {
  auto description =
      plan::describe(spec, {.rank = ranks.group.rank(), .ranks = ranks.group.size(), .sequence = ranks.sequence});
  plan::recompute(description, how.what, how.every);
  auto model = build_model(std::move(description), {.seed = 3, .dtype = type, .tensor = ranks});
  keep_for_backward(*model, how.kept);
  return model;
}

// The loss, and the gradients of all parameters, of two microbatches that are both forward before the first is backward.
std::vector<Tensor> outcome_of(const ModelSpec& spec, const Case& how, at::ScalarType type) {
  const auto model = model_of(spec, how, type);
  const auto [input, target] = data_of(spec, type);
  std::vector<Tensor> all;
  for (int micro = 0; micro < 2; ++micro) {
    model->set_dropout(5, 3 * micro);
    all.push_back(model->loss(input, target));
  }
  for (int micro = 0; micro < 2; ++micro) all[static_cast<std::size_t>(micro)].backward();
  for (const auto& parameter : model->parameters()) all.push_back(parameter.grad());
  return all;
}

std::vector<Case> cases_of(const ModelSpec& spec) {
  std::vector<Case> cases{{Recompute::full}, {Recompute::full, 2}};
  if (plan::recomputes_in_part(spec.type)) {
    cases.insert(cases.end(), {{Recompute::selective}, {Recompute::selective, 3}});
    cases.push_back({Recompute::selective, 1, plan::Kept::all});
  }
  return cases;
}

TEST(RecomputedModels, HaveTheBitsOfOthers) {
  for (const auto& [name, spec] : specs())
    for (const auto type : {at::kFloat, at::kDouble, at::kBFloat16})
      for (const auto& how : cases_of(spec)) {
        const auto expected = outcome_of(spec, {.kept = how.kept}, type), made = outcome_of(spec, how, type);
        ASSERT_EQ(made.size(), expected.size());
        for (std::size_t at = 0; at < made.size(); ++at)
          EXPECT_TRUE(at::equal(made[at], expected[at]))
              << name << ", " << c10::toString(type) << ", " << static_cast<int>(how.what) << " every " << how.every << ": "
              << at;
      }
}

// The formula of the plan, for fp32.
std::int64_t planned(const ModelSpec& spec, const Case& how, std::int64_t tokens, const plan::TensorPart& part = {}) {
  auto model = plan::describe(spec, part);
  plan::keep_for_backward(model, how.kept);
  plan::recompute(model, how.what, how.every);
  const plan::DataParallel layout{};
  const auto units = plan::step_units(model, plan::flats_of(model, layout));
  return plan::activations_of(model, units, layout,
                              {.memory = {.tokens = tokens, .on_host = true, .own_attention = cpu::prefers_own_gemm()}})
      .kept.back();
}

std::int64_t measured(const ModelSpec& spec, const Case& how, const TensorRanks& ranks = {}) {
  const auto model = model_of(spec, how, at::kFloat, ranks);
  const auto [input, target] = data_of(spec, at::kFloat, 3 * ranks.group.size());
  testing::RankMemory memory;
  model->set_dropout(5, 0);
  const auto loss = model->loss(input, target);
  return memory.current();
}

TEST(RecomputedModels, KeepWhatThePlanSays) {
  at::set_num_threads(1);
  for (auto [name, spec] : specs()) {
    spec.dropout = 0;
    // What the head keeps beside, such as how many targets count, is the same in all of them.
    const std::int64_t tokens = spec.type == ModelType::vgg ? 3 : 48;
    for (const auto& how : cases_of(spec)) {
      const Case none{.kept = how.kept};
      EXPECT_EQ(measured(spec, none) - measured(spec, how), planned(spec, none, tokens) - planned(spec, how, tokens))
          << name << ", " << static_cast<int>(how.what) << " every " << how.every;
    }
    EXPECT_NEAR(static_cast<double>(measured(spec, {})), static_cast<double>(planned(spec, {}, tokens)), 1024) << name;
  }
}

// The same of ranks that split the layers, with and without the sequence; and the table of docs/tensor_parallel.md.
TEST(RecomputedModels, KeepWhatThePlanSaysOfAPart) {
  at::set_num_threads(1);
  constexpr std::int64_t tries = 4;
  for (auto [name, spec] : specs()) {
    if (spec.type != ModelType::llama && spec.type != ModelType::gpt2) continue;
    spec.dropout = 0;
    for (const int count : {2, 4})
      for (const bool sequence : {false, true})
        testing::run_ranks(count, [&, &name = name, &spec = spec](World& world) {
          const TensorRanks ranks{.group = world.mesh({.tensor = count}).group(Axis::tensor), .sequence = sequence};
          const std::int64_t tokens = 48 * count;
          const plan::TensorPart part{.rank = world.rank(), .ranks = count, .sequence = sequence};
          // A thread of the backend may be the last to hold what was exchanged, so that it seems to be kept.
          const auto least = [&](const Case& how) {
            std::int64_t bytes = std::numeric_limits<std::int64_t>::max();
            for (int at = 0; at < tries; ++at) bytes = std::min(bytes, measured(spec, how, ranks));
            return bytes;
          };
          const auto what = fmt::format("{}, part of {}{}", name, count, sequence ? " with the sequence" : "");
          for (const auto& how : cases_of(spec)) {
            const Case none{.kept = how.kept};
            const auto kept = least(none) - least(how);
            const auto said = planned(spec, none, tokens, part) - planned(spec, how, tokens, part);
            // Of a norm's numbers for each token a rank has a part, which the plan rounds up.
            const std::int64_t rounded = sequence && spec.type == ModelType::llama ? spec.layers * tokens * 4 : 0;
            EXPECT_LE(kept, said) << what << ", " << static_cast<int>(how.what) << " every " << how.every;
            EXPECT_LE(said - kept, rounded) << what << ", " << static_cast<int>(how.what) << " every " << how.every;
          }
          const auto resolved = plan::resolve(spec);
          const std::int64_t d = resolved.dim, q = resolved.heads * resolved.head_dim,
                             k = std::max<std::int64_t>(count, resolved.kv_heads) * resolved.head_dim,
                             f = resolved.type == ModelType::llama ? 2 * resolved.ffn : resolved.ffn,
                             between = sequence ? d / count : d;
          EXPECT_EQ(plan::describe(spec, part).unit("blocks.0").saved_elements, 2 * between + (2 * q + 2 * k + f) / count)
              << what;
        });
  }
}

// What a device keeps of a model whose inputs go to the host: nothing of recomputed blocks.
TEST(RecomputedModels, LeaveInputsToTheHost) {
  auto model = plan::describe(specs().front().spec);
  plan::recompute(model, Recompute::full);
  const plan::DataParallel layout{};
  const auto units = plan::step_units(model, plan::flats_of(model, layout));
  const auto at_home = plan::activations_of(model, units, layout, {.memory = {.tokens = 48, .on_host = false}}),
             moved = plan::activations_of(model, units, layout,
                                          {.memory = {.tokens = 48, .on_host = false, .inputs_on_host = true}});
  const std::int64_t inputs = 4 * 32 * 48 * 4;
  EXPECT_EQ(moved.on_host, inputs);
  EXPECT_EQ(moved.kept.back(), at_home.kept.back() - inputs);
  EXPECT_EQ(plan::memory_of(model, layout, {.tokens = 48, .on_host = false, .inputs_on_host = true}).state.host, inputs);
}

// The table of docs/recomputation.md, in elements of a token.
TEST(RecomputedModels, KeepTheFormulasOfTheirPage) {
  for (const auto& [name, spec] : specs()) {
    if (spec.type == ModelType::vgg) continue;
    const auto resolved = plan::resolve(spec);
    const std::int64_t d = resolved.dim, q = resolved.heads * resolved.head_dim, k = resolved.kv_heads * resolved.head_dim,
                       f = resolved.type == ModelType::llama ? 2 * resolved.ffn : resolved.ffn;
    const bool attends = resolved.type != ModelType::mlp;
    const auto in_block = [&, &spec = spec](Recompute what) {
      const std::int64_t bytes = planned(spec, {}, 1) - planned(spec, {.what = what}, 1);
      return bytes / spec.layers / 4;
    };
    const std::int64_t statistics = attends ? (resolved.type == ModelType::llama ? 2 : 4) + resolved.heads : 0;
    EXPECT_EQ(in_block(Recompute::selective), attends ? q + 2 * k + f : f) << name;
    EXPECT_EQ(in_block(Recompute::full), (attends ? d + 2 * q + 2 * k + f : f) + statistics) << name;
  }
}

}  // namespace
}  // namespace bonfire::recompute_test
