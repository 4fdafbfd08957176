#include "bonfire/plan/step_time.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "bonfire/base/error.h"
#include "bonfire/plan/activations.h"
#include "tests/plan/toy_model.h"

namespace bonfire::plan::step_time_test {
namespace {

using testing::tied_toy_model;
using testing::toy_model;

// Units of forward 1 and backward 2; gathers and reductions as given.
StepTime time_of(const ModelDescription& model, const DataParallel& layout, FlatCost each, Host host = Host::computes) {
  const auto flats = flats_of(model, layout);
  StepCosts costs{.units = std::vector<UnitCost>(model.units.size(), {1, 2}),
                  .flats = std::vector<FlatCost>(flats.size(), each)};
  if (model.units.front().kind == UnitKind::root) costs.units.front() = {};
  return time_of_step(step_units(model, flats), layout, costs, host);
}

Span span(const StepTime& time, Act act, std::size_t index, int nth = 0) {
  for (const auto& span : time.spans)
    if (span.act == act && span.index == index && nth-- == 0) return span;
  ADD_FAILURE() << "no such span";
  return {};
}

const ModelDescription abc = toy_model({256, 256, 256});

TEST(StepTime, WithoutPrefetchEveryGatherIsWaitedFor) {
  const DataParallel layout{.shard = 2, .what = Sharded::parameters, .prefetch = 0};
  // Forward: 3 x (1 + 1). c: 2. b: c's reduction, then its own gather, then 2. a: the same. Then a's reduction.
  for (const Host host : {Host::computes, Host::runs_ahead}) {
    const auto step = time_of(abc, layout, {.gather = 1, .reduce = 1}, host);
    EXPECT_DOUBLE_EQ(step.seconds, 6 + 2 + 4 + 4 + 1);
    EXPECT_DOUBLE_EQ(step.compute, 9);
    EXPECT_DOUBLE_EQ(step.communication, 8);
    EXPECT_DOUBLE_EQ(step.exposed(), 8);
  }
}

TEST(StepTime, WithOneAheadOnlyTheEndsAreSeen) {
  DataParallel layout{.shard = 2, .what = Sharded::parameters, .prefetch = 1};
  for (const Host host : {Host::computes, Host::runs_ahead}) {
    const auto step = time_of(abc, layout, {.gather = 1, .reduce = 1}, host);
    EXPECT_DOUBLE_EQ(step.seconds, 9 + 1 + 1);  // the first gather and the last reduction
  }
  // b's memory comes in during c's forward. While c's backward runs nothing else is asked for; a's gather stands behind b's
  // reduction, which ends at 9.
  layout.backward_prefetch = BackwardPrefetch::after_reduction;
  const auto after = time_of(abc, layout, {.gather = 1, .reduce = 1});
  EXPECT_DOUBLE_EQ(span(after, Act::gather, 1, 1).start, 3);
  EXPECT_DOUBLE_EQ(span(after, Act::gather, 2, 1).start, 9);
  EXPECT_DOUBLE_EQ(after.seconds, 13);
}

TEST(StepTime, OfAWireThatIsTooSlowIsTheWires) {
  // Every collective takes 10: the wire is never idle, but for what the last reduction waits for.
  const auto step = time_of(abc, {.shard = 2, .what = Sharded::parameters, .prefetch = 4}, {.gather = 10, .reduce = 10});
  // Gathers of a, b, c, then of b and a again: until 50. c's reduction is ready at 33, b's at 42 (a comes in at 50), a's
  // at 52.
  EXPECT_DOUBLE_EQ(step.seconds, 80);
  EXPECT_DOUBLE_EQ(span(step, Act::reduce, 0).start, 50);
}

TEST(StepTime, ComputationWaitsForMemoryOfWholeGradients) {
  const DataParallel layout{.shard = 2, .what = Sharded::parameters, .reshard_after_forward = false, .prefetch = 1};
  const auto step = time_of(abc, layout, {.gather = 1, .reduce = 5});
  // Forward ends at 4, c at 6, b at 8. Two whole gradients are out until c's was reduced, at 11.
  EXPECT_DOUBLE_EQ(span(step, Act::backward, 1).start, 6);
  EXPECT_DOUBLE_EQ(span(step, Act::backward, 0).start, 11);
  EXPECT_DOUBLE_EQ(step.seconds, 6 + 15);
  // With three of them nobody waits.
  auto wide = layout;
  wide.prefetch = 2;
  EXPECT_DOUBLE_EQ(span(time_of(abc, wide, {.gather = 1, .reduce = 5}), Act::backward, 0).start, 8);
  // Nor where gradients are kept whole.
  auto full = layout;
  full.accumulation = Accumulation::full;
  EXPECT_DOUBLE_EQ(span(time_of(abc, full, {.gather = 1, .reduce = 5}), Act::backward, 0).start, 8);
}

// A host that only issues asks for everything at once; memory alone holds the gathers back.
TEST(StepTime, AGatherWaitsForTheLastUseOfItsMemory) {
  const DataParallel layout{.shard = 2, .what = Sharded::parameters, .prefetch = 1};
  const auto step = time_of(toy_model({256, 256, 256, 256}), layout, {.gather = 0.1, .reduce = 0.1}, Host::runs_ahead);
  // Two buffers: c's gather needs a's, whose forward ends at 1.1.
  EXPECT_DOUBLE_EQ(span(step, Act::gather, 2).start, 0.1);
  EXPECT_DOUBLE_EQ(span(step, Act::gather, 1).start, 1.1);
}

TEST(StepTime, OfReplicasAndOfZero1) {
  const BucketOptions each_alone{.bucket_bytes = 1, .first_bucket_bytes = 1};
  // Forward 3, then reductions of 3 behind backwards of 2: ready at 5, 7, 9, on the wire until 5 + 9.
  EXPECT_DOUBLE_EQ(time_of(abc, {.replicate = 2, .buckets = each_alone}, {.across = 3}).seconds, 14);
  // Only in the last microbatch.
  EXPECT_DOUBLE_EQ(time_of(abc, {.replicate = 2, .microbatches = 2, .buckets = each_alone}, {.across = 3}).seconds, 23);
  // Scattered, updated (1 each) and sent (2 each): the first is sent from 15 on.
  const auto flats = flats_of(abc, {.replicate = 2, .buckets = each_alone});
  const DataParallel zero1{.shard = 2, .what = Sharded::optimizer, .buckets = each_alone};
  const StepCosts costs{.units = std::vector<UnitCost>(3, {1, 2}),
                        .flats = std::vector<FlatCost>(3, {.reduce = 3, .refresh = 2}),
                        .update = 3};
  EXPECT_DOUBLE_EQ(time_of_step(step_units(abc, flats), zero1, costs).seconds, 15 + 6);
}

TEST(StepTime, OfATiedWeightEndsWithItsReduction) {
  const auto model = tied_toy_model(512, {256, 256, 256});
  const auto step = time_of(model, {.shard = 2, .what = Sharded::parameters, .prefetch = 1}, {.gather = 1, .reduce = 1});
  // The root is the fourth buffer: gathered first, reduced last.
  EXPECT_DOUBLE_EQ(span(step, Act::gather, 3).start, 0);
  EXPECT_DOUBLE_EQ(span(step, Act::reduce, 3).end, step.seconds);
  EXPECT_DOUBLE_EQ(step.seconds, 2 + 9 + 2);  // root and a; the Units; a's reduction and the root's
}

// Laws: more ahead is never slower, and no step is shorter than what either stream has to do.
TEST(StepTime, MoreAheadIsNeverSlower) {
  for (const double gather : {0.25, 1.0, 3.0})
    for (const auto backward : {BackwardPrefetch::before_reduction, BackwardPrefetch::after_reduction})
      for (const Host host : {Host::computes, Host::runs_ahead}) {
        double before = 1e9;
        for (const int prefetch : {0, 1, 2, 4}) {
          const auto step =
              time_of(toy_model({256, 256, 256, 256, 256, 256}),
                      {.shard = 2, .what = Sharded::parameters, .prefetch = prefetch, .backward_prefetch = backward},
                      {.gather = gather, .reduce = gather}, host);
          EXPECT_LE(step.seconds, before);
          EXPECT_GE(step.seconds, std::max(step.compute, step.communication));
          before = step.seconds;
        }
      }
}

TEST(StepTime, RefusesCostsOfAnotherModel) {
  const auto units = step_units(abc, flats_of(abc, {}));
  EXPECT_THROW(time_of_step(units, {}, {}), Error);
}

// What a forward repeats is a part of the backward that repeats it.
TEST(Recomputing, AddsToBackwardWhatItMakesAgain) {
  for (const auto type : {ModelType::llama, ModelType::gpt2, ModelType::mlp}) {
    const auto described =
        describe({.type = type, .dim = 64, .layers = 4, .heads = 4, .ffn = 192, .vocab = 64, .positions = 32});
    const StepCosts costs{.units = std::vector<UnitCost>(described.units.size(), {3, 6})};
    auto full = described, part = described;
    recompute(full, Recompute::full, 2);
    recompute(part, Recompute::selective);
    const auto whole = recomputing(costs, full), some = recomputing(costs, part);
    for (std::size_t at = 0; at < described.units.size(); ++at) {
      const auto& name = described.units[at].name;
      const bool block = described.units[at].kind == UnitKind::block;
      EXPECT_EQ(whole.units[at].backward, name == "blocks.0" || name == "blocks.2" ? 9 : 6) << name;
      EXPECT_EQ(whole.units[at].forward, 3);
      if (!block) EXPECT_EQ(some.units[at].backward, 6) << name;
      if (!block) continue;
      // Two of a block's products, each about half of its part.
      EXPECT_GT(some.units[at].backward, 6 + 3 * 0.4) << name;
      EXPECT_LT(some.units[at].backward, 6 + 3 * 0.75) << name;
    }
  }
}

// Twice per block and direction all tokens cross, in an all-reduce or in the two collectives that take its place; the loss
// has three numbers of eight bytes for each token and rank.
TEST(Exchanging, AddsToUnitsWhatCrossesInThem) {
  const ModelSpec spec{
      .type = ModelType::gpt2, .dim = 64, .layers = 2, .heads = 4, .ffn = 192, .vocab = 64, .positions = 32};
  const DataParallel layout{.tokens = 32};
  const double width = 32 * 64 * 4, bandwidth = 1e6;
  for (const bool sequence : {false, true}) {
    const auto model = describe(spec, {.ranks = 4, .sequence = sequence});
    const StepCosts costs{.units = std::vector<UnitCost>(model.units.size(), {3, 6})};
    const auto with = exchanging(costs, model, layout, {.tensor = {.bytes_per_second = bandwidth}});
    for (std::size_t at = 0; at < model.units.size(); ++at) {
      const auto& name = model.units[at].name;
      const double sum = 2 * 3 / 4.0 * width / bandwidth;  // of an all-reduce
      if (name.starts_with("blocks.")) {
        EXPECT_NEAR(with.units[at].forward, 3 + 2 * sum, 1e-9) << name;
        // What is gathered for the weights, and the gradients of norms and biases that have part of the sequence.
        const double again = sequence ? 2 * 3 / 4.0 * width / bandwidth + 6 * 2 * 3 / 4.0 * 64 * 4 / bandwidth : 0;
        EXPECT_NEAR(with.units[at].backward, 6 + 2 * sum + again, 1e-9) << name;
      }
      if (name == "head" && !sequence) {
        EXPECT_NEAR(with.units[at].forward, 3 + 3 / 4.0 * 3 * 8 * 4 * 32 / bandwidth, 1e-9);
      }
    }
    EXPECT_EQ(exchanging(costs, describe(spec), layout, {.tensor = {.bytes_per_second = 1}}).units[1].forward, 3);
  }
}

TEST(Exchanging, CountsTheRingBetweenRanksThatShareSamples) {
  const ModelSpec spec{
      .type = ModelType::gpt2, .dim = 64, .layers = 2, .heads = 4, .ffn = 192, .vocab = 64, .positions = 32};
  const auto model = describe(spec);
  const StepCosts costs{.units = std::vector<UnitCost>(model.units.size(), {3, 6})};
  const auto with = exchanging(costs, model, {.replicate = 2, .tokens = 16, .context = {.ranks = 2}},
                               {.context = {.latency_seconds = 0.5, .bytes_per_second = 1e6}});
  const auto keys = 0.5 + 16 * 2 * 64 * 4 / 1e6;
  EXPECT_NEAR(with.units[2].forward, 3 + keys, 1e-9);
  EXPECT_NEAR(with.units[2].backward, 6 + 2 * keys, 1e-9);
}

}  // namespace
}  // namespace bonfire::plan::step_time_test
