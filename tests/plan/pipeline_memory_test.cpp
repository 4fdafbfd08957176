#include <gtest/gtest.h>

#include <algorithm>

#include "bonfire/plan/pipeline.h"
#include "bonfire/schedule/generate.h"
#include "bonfire/schedule/lowering.h"

namespace bonfire::plan::pipeline_memory_test {
namespace {

const ModelSpec spec{.type = ModelType::llama, .dim = 64, .layers = 6, .heads = 4, .ffn = 96, .vocab = 100};
constexpr std::int64_t samples = 2, sequence = 8, tokens = samples * sequence;

PipelineLayout layout_of(const char* name, int microbatches, const DataParallel& data = {}) {
  const int chunks = schedule::natural_chunks(name);
  const auto table = schedule::generate(name, {.ranks = 2, .microbatches = microbatches, .chunks = chunks});
  PipelineLayout layout{.table = schedule::lower(table, {.sharded_parameters = data.comes_and_goes(), .reductions = true}),
                        .samples = std::vector<std::int64_t>(static_cast<std::size_t>(microbatches), samples),
                        .tokens = sequence,
                        .data = data};
  // Embedding, six blocks, head.
  const int each = 8 / layout.table.stages;
  for (int begin = 0; begin < 8; begin += each) layout.stages.push_back({begin, begin + each});
  return layout;
}

Memory of(const char* name, int microbatches, int rank, const DataParallel& data = {}, bool on_host = true) {
  return memory_of(describe(spec), layout_of(name, microbatches, data), {.on_host = on_host}, rank);
}

// All forwards of the first rank are kept until the first backward: three blocks of each microbatch, and what was sent.
TEST(PipelineMemory, GrowsByWhatAMicrobatchKeeps) {
  const std::int64_t block = (2 * 64 + 4 * 64 + 2 * 96 + 2 + 4) * 4 * tokens, sent = 64 * 4 * tokens;
  EXPECT_EQ(of("gpipe", 6, 0).activations - of("gpipe", 4, 0).activations, 2 * (3 * block + sent));
  EXPECT_EQ(of("1f1b", 6, 0).activations, of("1f1b", 4, 0).activations);
  EXPECT_EQ(of("1f1b", 6, 1).activations - of("1f1b", 4, 1).activations, 2 * sent)
      << "gradients that were sent are kept until the step ends";
  EXPECT_EQ(of("1f1b", 6, 1, {}, /*on_host=*/false).activations, of("1f1b", 4, 1, {}, /*on_host=*/false).activations);
}

// A rank that computes on the host has nowhere to offload to.
TEST(PipelineMemory, OnTheHostOffloadMovesNothing) {
  for (const int rank : {0, 1}) {
    const auto plain = of("interleaved", 4, rank), offloaded = of("interleaved", 4, rank, {.offload = Offload::parameters});
    EXPECT_EQ(offloaded.step(), plain.step());
    EXPECT_EQ(offloaded.gathered, 0);
    const auto on_gpu = of("interleaved", 4, rank, {.offload = Offload::parameters}, /*on_host=*/false);
    EXPECT_GT(on_gpu.gathered, 0);
    EXPECT_GT(on_gpu.state.host, 0);
  }
}

// The first half of a backward leaves the two factors of every weight's gradient to the second, Unit by Unit, while what
// Units before it keep is still there.
TEST(PipelineMemory, HalvesOfABackwardHoldTheFactorsOfWeights) {
  const std::int64_t factors = (3 * 64 + 64) + (64 + 64) + (2 * 96 + 64) + (64 + 96), block = 2 * 64 + 4 * 64 + 2 * 96;
  const auto whole = of("1f1b", 4, 0).activations, halves = of("zb-h1", 4, 0).activations;
  EXPECT_GE(halves - whole, 2 * (factors - block) * 4 * tokens);
}

TEST(PipelineMemory, CountsNothingThatFrozenStagesDoNotKeep) {
  auto model = describe(spec);
  const auto layout = layout_of("gpipe", 4);
  const auto all = memory_of(model, layout, {}, 0);
  for (std::size_t unit = 0; unit < 4; ++unit)
    for (auto& parameter : model.units[unit].parameters) parameter.trained = false;
  const auto frozen = memory_of(model, layout, {}, 0);
  EXPECT_EQ(frozen.state.total(), frozen.state.parameters);
  EXPECT_LT(frozen.activations, all.activations / 4);
}

TEST(PipelineMemory, OfAPipelineIsThatOfTheRankThatNeedsMost) {
  for (const char* name : {"gpipe", "1f1b", "interleaved"}) {
    const auto layout = layout_of(name, 4);
    const auto first = of(name, 4, 0).total(), second = of(name, 4, 1).total();
    EXPECT_NE(first, second);
    EXPECT_EQ(memory_of(describe(spec), layout, {.on_host = true}).total(), std::max(first, second)) << name;
  }
}

}  // namespace
}  // namespace bonfire::plan::pipeline_memory_test
