#include "bonfire/plan/memory.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <stdexcept>

#include <fmt/format.h>

#include "bonfire/plan/activation_bytes.h"
#include "bonfire/plan/loans.h"
#include "bonfire/plan/memory_table.h"
#include "bonfire/plan/step_events.h"
#include "tests/plan/toy_model.h"

namespace bonfire::plan::memory_test {
namespace {

using testing::tied_toy_model;
using testing::toy_model;

const PrecisionKind& kind(const std::string& name) {
  for (const auto& kind : precision_kinds())
    if (kind.name == name) return kind;
  throw std::runtime_error(name);
}

TEST(Offload, MovesStateToTheHostAndLosesNothing) {
  const auto model = toy_model({256, 512, 1024, 512});
  const MemoryOptions on_gpu{.tokens = 8, .on_host = false};
  for (const auto compute : {Dtype::fp32, Dtype::bf16}) {
    DataParallel layout{.shard = 2, .what = Sharded::parameters, .compute = compute};
    const auto whole = memory_of(model, layout, on_gpu);
    layout.offload = Offload::optimizer;
    const auto optimizer = memory_of(model, layout, on_gpu);
    layout.offload = Offload::parameters;
    const auto parameters = memory_of(model, layout, on_gpu);

    EXPECT_EQ(whole.state.host, 0);
    EXPECT_EQ(optimizer.state.parameters, whole.state.parameters);
    EXPECT_EQ(optimizer.state.masters + optimizer.state.optimizer, 0);
    // Adam's two moments and a master, which in fp32 is one more copy of what forward reads.
    const auto copies = compute == Dtype::fp32 ? whole.state.parameters : whole.state.masters;
    EXPECT_EQ(optimizer.state.host, whole.state.optimizer + copies);
    EXPECT_EQ(parameters.state.total(), whole.state.gradients);
    EXPECT_EQ(parameters.state.host, whole.state.total() - whole.state.gradients);
    EXPECT_EQ(parameters.gathered, whole.gathered);

    layout.offload = Offload::parameters;
    EXPECT_EQ(memory_of(model, layout, {.tokens = 8}).state.host, 0) << "ranks that compute on the host";
  }
  // One rank that keeps nothing on its device gathers from its host.
  EXPECT_GT(memory_of(model, {.offload = Offload::parameters}, on_gpu).gathered, 0);
  EXPECT_TRUE(collectives_of_step(model, {.offload = Offload::parameters}).empty());
}

TEST(BytesPerParameter, AreTheOnesPeopleKnow) {
  const auto fp32 = bytes_per_parameter(kind("fp32"), {});
  EXPECT_EQ(fp32.parameters, 4);
  EXPECT_EQ(fp32.gradients, 4);
  EXPECT_EQ(fp32.optimizer, 8);
  EXPECT_EQ(fp32.total() + activations_per_parameter, 24);

  const auto mixed = bytes_per_parameter(kind("mixed"), {});
  EXPECT_EQ(mixed.parameters, 2);
  EXPECT_EQ(mixed.gradients, 2);
  EXPECT_EQ(mixed.optimizer, 12);

  const auto accumulated = bytes_per_parameter(kind("mixed, fp32 gradients"), {});
  EXPECT_EQ(accumulated.parameters, 2);
  EXPECT_EQ(accumulated.gradients, 4);
  EXPECT_EQ(accumulated.optimizer, 12);
}

TEST(BytesPerParameter, ShrinkByFourEightAndTheNumberOfRanks) {
  const int many = 1 << 20;
  EXPECT_NEAR(reduction_factor(kind("mixed"), factors_of(Sharded::optimizer, many)), 4, 1e-3);
  EXPECT_NEAR(reduction_factor(kind("mixed"), factors_of(Sharded::gradients, many)), 8, 1e-3);
  for (const int ranks : {1, 2, 64})
    for (const auto& kind : precision_kinds())
      EXPECT_DOUBLE_EQ(reduction_factor(kind, factors_of(Sharded::parameters, ranks)), ranks);
}

// Table 1 of the ZeRO paper: gigabytes of model state on a device, mixed precision with Adam.
TEST(BytesPerParameter, GiveThePublishedTable) {
  struct Row {
    int ranks;
    double optimizer, gradients, parameters;
  };
  struct Table {
    double billions;
    std::vector<Row> rows;
  };
  const Table tables[] = {{7.5,
                           {{1, 120, 120, 120},
                            {4, 52.5, 41.3, 30},
                            {16, 35.6, 21.6, 7.5},
                            {64, 31.4, 16.6, 1.88},
                            {256, 30.4, 15.4, 0.47},
                            {1024, 30.1, 15.1, 0.12}}},
                          {128,
                           {{1, 2048, 2048, 2048},
                            {4, 896, 704, 512},
                            {16, 608, 368, 128},
                            {64, 536, 284, 32},
                            {256, 518, 263, 8},
                            {1024, 513, 257, 2}}},
                          {1000,
                           {{1, 16000, 16000, 16000},
                            {4, 7000, 5500, 4000},
                            {16, 4750, 2875, 1000},
                            {64, 4187, 2218, 250},
                            {256, 4046, 2054, 62.5},
                            {1024, 4011, 2013, 15.6}}}};
  for (const auto& [billions, rows] : tables)
    for (const auto& row : rows)
      for (const auto& [what, published] : {std::pair{Sharded::optimizer, row.optimizer},
                                            {Sharded::gradients, row.gradients},
                                            {Sharded::parameters, row.parameters}}) {
        const double bytes = billions * bytes_per_parameter(kind("mixed"), factors_of(what, row.ranks)).total();
        // Printed with three digits, some of them cut off.
        EXPECT_NEAR(bytes, published, std::max(0.005, 0.005 * published))
            << billions << "B, " << name_of(what) << ", " << row.ranks;
      }
}

// 256 and 512 elements on up to four ranks: no padding, so the formula can be counted by hand.
TEST(ModelState, IsTheFormula) {
  const auto model = toy_model({256, 512});
  const auto state = [&](const DataParallel& layout) { return model_state(flats_of(model, layout), layout, 2); };
  const auto ddp = state({.replicate = 4});
  EXPECT_EQ(ddp.parameters, 768 * 4);
  EXPECT_EQ(ddp.masters, 0);
  EXPECT_EQ(ddp.gradients, 768 * 4);
  EXPECT_EQ(ddp.optimizer, 768 * 8);

  const auto zero1 = state({.shard = 4, .what = Sharded::optimizer, .compute = Dtype::bf16});
  EXPECT_EQ(zero1.parameters, 768 * 2);
  EXPECT_EQ(zero1.masters, 768);
  EXPECT_EQ(zero1.gradients, 768 * 4);
  EXPECT_EQ(zero1.optimizer, 768 * 2);

  const auto zero2 = state({.shard = 4, .what = Sharded::gradients, .compute = Dtype::bf16, .gradient = Dtype::bf16});
  EXPECT_EQ(zero2.parameters, 768 * 2);
  EXPECT_EQ(zero2.gradients, 768 * 2 / 4);

  const auto zero3 = state({.replicate = 2, .shard = 2, .what = Sharded::parameters});
  EXPECT_EQ(zero3.total(), 768 * 16 / 2);
  const auto full = state({.shard = 2, .what = Sharded::parameters, .accumulation = Accumulation::full});
  EXPECT_EQ(full.total(), 768 * 12 / 2 + 768 * 4);
}

TEST(ModelState, OfFrozenParametersIsThemselves) {
  auto model = toy_model({256, 512});
  model.units[0].parameters[0].trained = false;
  const DataParallel layout{.shard = 2, .what = Sharded::parameters, .compute = Dtype::bf16};
  const auto state = model_state(flats_of(model, layout), layout, 2);
  EXPECT_EQ(state.parameters, 768 * 2 / 2);
  EXPECT_EQ(state.masters, 512 * 4 / 2);
  EXPECT_EQ(state.gradients, 512 * 4 / 2);
  EXPECT_EQ(state.optimizer, 512 * 8 / 2);
}

// With padding a rank never holds less than its part, and never more than the padding of each parameter and Unit.
TEST(ModelState, ComesCloseToBytesPerParameter) {
  const auto model = describe(published_model("gpt2-124m"));
  for (const auto& kind : precision_kinds())
    for (const int shard : {1, 2, 8})
      for (const auto what : {Sharded::optimizer, Sharded::gradients, Sharded::parameters}) {
        const DataParallel layout{
            .shard = shard, .what = what, .compute = kind.compute, .master = kind.master, .gradient = kind.gradient};
        const double formula =
            bytes_per_parameter(kind, layout.factors()).total() * static_cast<double>(model.parameter_elements());
        const auto state = static_cast<double>(model_state(flats_of(model, layout), layout, 2).total());
        EXPECT_GE(state, formula);
        EXPECT_LT(state, 1.001 * formula) << kind.name << " " << shard << " " << name_of(what);
      }
}

TEST(Loans, TakeTheSmallestFreeBufferAndTheSameAgain) {
  Loans pool;
  const auto small = pool.borrow(100), large = pool.borrow(5000);
  EXPECT_EQ(pool.bytes(), 512 + 5120);
  pool.give_back(large);
  pool.give_back(small);
  EXPECT_EQ(pool.borrow(400), small);
  EXPECT_EQ(pool.borrow(400), large);  // larger than needed, but free
  pool.give_back(small);
  pool.give_back(large);
  EXPECT_EQ(pool.borrow(4000, 7), large);
  pool.give_back(large);
  pool.borrow(300, 8);
  EXPECT_EQ(pool.borrow(4000, 7), large);
  EXPECT_EQ(pool.buffers(), 2u);
}

Memory sharded(const ModelDescription& model, int prefetch, bool reshard = true) {
  return memory_of(model, {.shard = 2, .what = Sharded::parameters, .reshard_after_forward = reshard, .prefetch = prefetch},
                   {});
}

TEST(Memory, GatheredParametersAreOneBufferMoreThanUnitsAhead) {
  const auto model = toy_model({1024, 1024, 1024, 1024, 1024, 1024});
  for (const int prefetch : {0, 1, 2, 3, 4}) EXPECT_EQ(sharded(model, prefetch).gathered, (prefetch + 1) * 4096) << prefetch;
  EXPECT_EQ(sharded(model, 100).gathered, 6 * 4096);
  EXPECT_EQ(sharded(model, 1, false).gathered, 6 * 4096);
  EXPECT_EQ(memory_of(model, {.shard = 2, .what = Sharded::gradients}, {}).gathered, 0);
  // The root's stays beside them.
  EXPECT_EQ(sharded(tied_toy_model(2048, {1024, 1024, 1024, 1024, 1024}), 1).gathered, 8192 + 2 * 4096);
}

TEST(Memory, WholeGradientsAreAtLeastTwoBuffers) {
  const auto model = toy_model({1024, 1024, 1024, 1024, 1024, 1024});
  for (const int prefetch : {0, 1, 2, 3})
    EXPECT_EQ(sharded(model, prefetch).whole_gradients, std::max(2, prefetch + 1) * 4096);
  const auto zero1 = memory_of(model, {.shard = 2, .what = Sharded::optimizer}, {});
  EXPECT_EQ(zero1.whole_gradients, 0);  // kept whole
  // In the type in which they travel.
  const DataParallel rounded{.shard = 2, .what = Sharded::parameters, .prefetch = 1, .reduction = Dtype::bf16};
  EXPECT_EQ(memory_of(model, rounded, {}).whole_gradients, 2 * 2048);
}

// The peak of activations lies where backward begins: all that forward has kept, and what backward adds.
TEST(Memory, ActivationsFollowBackward) {
  auto model = toy_model({256, 256, 256});
  for (auto& unit : model.units) unit.saved_elements = 10, unit.output_elements = 3, unit.working_elements = 5;
  model.units[1].working_elements = 100;
  const DataParallel layout{};
  EXPECT_EQ(memory_of(model, layout, {.tokens = 7}).activations, 7 * 4 * (20 + 3 + 100));
  model.units[1].working_elements = 14;
  EXPECT_EQ(memory_of(model, layout, {.tokens = 7}).activations, 7 * 4 * (30 + 3 + 5));
  // A weight's gradient that is made in another type first.
  model.units[2].weight_elements = 1000;
  EXPECT_EQ(memory_of(model, layout, {.tokens = 7}).activations, 7 * 4 * (30 + 3 + 5));
  model.units[2].working_beside_weight = 2;
  EXPECT_EQ(memory_of(model, {.compute = Dtype::bf16}, {.tokens = 7, .on_host = false}).activations,
            7 * 2 * (30 + 3 + 2) + 2000);
  // The host widens its factors instead, so many rows at a time.
  model.units[2].parameters[0].shape = {20, 50};
  EXPECT_EQ(memory_of(model, {.compute = Dtype::bf16}, {.tokens = 7}).activations, 7 * 2 * (30 + 3 + 2) + 7 * 4 * (20 + 50));
}

// In fp32 convolutions copy what they read into an order of their own. In two bytes not every CPU's library has them:
// torch's own write down each input nine times.
TEST(Memory, ConvolutionsInTwoBytesWorkInBlocksWhereTheLibraryHasThem) {
  const auto model = describe({.type = ModelType::vgg, .image = 32, .pool = 1, .convolutions = {32, 32, 0, 32}});
  constexpr std::int64_t samples = 64, input = 32 * 32 * 32;
  const auto activations = [&](Dtype compute, bool narrow_convolutions) {
    return memory_of(model, {.compute = compute}, {.tokens = samples, .narrow_convolutions = narrow_convolutions})
        .activations;
  };
  EXPECT_EQ(activations(Dtype::fp32, true), activations(Dtype::fp32, false));
  const auto gradient = convolution_workspace({32, 32, 32 * 32}, Dtype::bf16,
                                              {.tokens = samples, .narrow_convolutions = true})
                            .gradient_bytes;
  EXPECT_EQ(activations(Dtype::bf16, false) - activations(Dtype::bf16, true), 2 * (9 - 2) * input * samples - gradient);
}

// What oneDNN of LibTorch 2.11 was seen to allocate on a CPU with AVX512-BF16 (jit_avx512_core_bf16, for the weight's
// gradient), but for its barriers, of which each has a page.
TEST(Memory, TheGradientOfAConvolutionInTwoBytesIsMadeInFourAndByParts) {
  struct Seen {
    std::int64_t input, output, side, samples;
    int threads;
    std::int64_t bytes;
  };
  for (const auto& seen :
       {Seen{192, 192, 24, 4, 2, 3585988}, {192, 192, 12, 4, 2, 1464516}, {48, 48, 48, 4, 2, 1078084},
        {64, 128, 24, 1, 2, 1054148},      {1, 192, 24, 4, 2, 245700},    {1, 48, 48, 4, 2, 454852},
        {1, 64, 24, 1, 2, 93124},          {128, 256, 16, 2, 4, 2791876}, {64, 128, 32, 2, 4, 1414596},
        {3, 64, 32, 2, 4, 155076},         {128, 256, 8, 8, 1, 1242564},  {64, 128, 16, 8, 1, 406468},
        {64, 64, 12, 3, 4, 396228},        {32, 64, 24, 3, 4, 396228},    {3, 32, 24, 3, 4, 101828},
        {24, 40, 20, 2, 2, 252740},        {128, 256, 16, 2, 8, 2820548}, {3, 128, 16, 2, 8, 96708}}) {
    const auto bytes =
        convolution_workspace({seen.input, seen.output, seen.side * seen.side}, Dtype::bf16,
                              {.tokens = seen.samples, .narrow_convolutions = true, .threads = seen.threads})
            .gradient_bytes;
    const std::string what = fmt::format("{} to {} channels of {} x {}, {} samples, {} threads", seen.input, seen.output,
                                         seen.side, seen.side, seen.samples, seen.threads);
    EXPECT_LE(bytes, seen.bytes) << what;
    EXPECT_LE(seen.bytes, bytes + (4 + seen.threads) * 4500) << what;
  }
  EXPECT_EQ(convolution_workspace({64, 64, 256}, Dtype::fp32, {.tokens = 4, .threads = 2}).gradient_bytes, 0);
}

// Units in front of everything that is trained are run without a graph: they keep nothing.
TEST(Memory, UnitsBeforeTheFirstTrainedOneKeepNothing) {
  auto model = toy_model({256, 256, 256});
  for (auto& unit : model.units) unit.saved_elements = 10, unit.output_elements = 3, unit.working_elements = 5;
  const DataParallel layout{};
  const auto all = memory_of(model, layout, {.tokens = 7}).activations;
  model.units[0].parameters[0].trained = false;
  EXPECT_EQ(memory_of(model, layout, {.tokens = 7}).activations, all - 7 * 4 * 10);
  model.units[0].parameters[0].trained = true;
  model.units[1].parameters[0].trained = false;
  EXPECT_EQ(memory_of(model, layout, {.tokens = 7}).activations, all) << "gradients pass through it";
}

// Of the first one what lies in front of its first trained weight.
TEST(Memory, OfTheFirstTrainedUnitCountsWhatFollowsItsFirstTrainedWeight) {
  const ModelSpec spec{.type = ModelType::llama, .dim = 64, .layers = 2, .heads = 4, .ffn = 96, .vocab = 100};
  const auto kept = [&](const std::vector<std::string>& trained) {
    auto model = describe(spec);
    for (auto& unit : model.units)
      for (auto& parameter : unit.parameters)
        parameter.trained =
            unit.kind == UnitKind::head || std::any_of(trained.begin(), trained.end(), [&](const std::string& name) {
              return full_name(unit, parameter).starts_with(name);
            });
    const DataParallel layout{};
    const auto flats = flats_of(model, layout);
    return activations_of(model, step_units(model, flats), layout, {.memory = {.tokens = 1}}).kept.back() / 4;
  };
  // Input, q, k, v, the result of attention, the middle, gate and up; rstd twice and a sum for each head.
  const std::int64_t head = 64 + 64 + 100 + 1, block = 64 + 3 * 64 + 64 + 64 + 2 * 96 + 6;
  EXPECT_EQ(kept({}), head);
  EXPECT_EQ(kept({"embedding"}), head + 2 * block);
  EXPECT_EQ(kept({"blocks.1"}), head + block);
  EXPECT_EQ(kept({"blocks.1.attention.output"}), head + block - (64 + 3 * 64 + 5));
  EXPECT_EQ(kept({"blocks.1.feed_norm"}), head + block - (64 + 4 * 64 + 5));
  EXPECT_EQ(kept({"blocks.1.feed.down"}), head + 2 * 96);
  EXPECT_EQ(kept({"blocks.0.feed.down", "blocks.1.feed.down"}), head + 2 * 96 + block);
}

TEST(Memory, WithoutALearnedOrderNothingIsGatheredAhead) {
  const auto model = toy_model({1024, 1024, 1024, 1024, 1024, 1024});
  for (const bool reshard : {true, false}) {
    const DataParallel layout{.shard = 2, .what = Sharded::parameters, .reshard_after_forward = reshard};
    EXPECT_EQ(memory_of(model, layout, {.learns_order = false}).gathered, (reshard ? 1 : 6) * 4096);
    EXPECT_EQ(memory_of(model, layout, {}).gathered, (reshard ? 3 : 6) * 4096);
  }
}

// A flat buffer is made beside the parameters that go into it, and its gradients when these have gone.
TEST(Building, HoldsOneBufferTwice) {
  auto model = toy_model({1024, 1024, 1024, 1024});
  const std::int64_t unit = 4096;
  const MemoryOptions options{.optimizer_states = 0};
  EXPECT_EQ(memory_of(model, {}, options).building, 8 * unit) << "one bucket: twice, and then with gradients";
  EXPECT_EQ(memory_of(model, {.compute = Dtype::bf16}, options).building, (4 + 2 + 4) * unit);
  for (auto& each : model.units) each.parameters[0].trained = false;
  EXPECT_EQ(memory_of(model, {}, options).building, 8 * unit);
  const DataParallel small{.buckets = {.bucket_bytes = unit, .first_bucket_bytes = unit}};
  const auto frozen = memory_of(model, small, options);
  EXPECT_EQ(frozen.building, 5 * unit);
  EXPECT_EQ(frozen.step(), 4 * unit);
  EXPECT_EQ(frozen.total(), 5 * unit);
  // Unit by Unit where they are sharded, unless the whole must be there first.
  const DataParallel sharded{.shard = 4, .what = Sharded::parameters};
  EXPECT_EQ(memory_of(model, sharded, options).building, 3 * unit / 4 + unit + unit / 4);
  EXPECT_EQ(memory_of(model, sharded, {.optimizer_states = 0, .built_whole = true}).building, 4 * unit + unit / 4);
}

// The first backward shows that the root's weight is read by the last Unit alone, and is finished first.
TEST(Moving, HoldsOldBuffersUntilTheirLastParameterHasMoved) {
  auto model = toy_model({1024, 1024, 1024, 1024});
  model.units.front().kind = UnitKind::root;
  model.units.push_back({.name = "last", .shared = {model.units.front().parameters[0].name}});
  const std::int64_t unit = 4096;
  DataParallel layout{.buckets = {.bucket_bytes = 2 * unit, .first_bucket_bytes = 2 * unit}};
  const auto names = [&] {
    std::vector<std::string> all;
    for (const auto& flat : flats_of(model, layout))
      for (const auto& segment : flat.segments) all.push_back(segment.name);
    return all;
  };
  const auto name = [&](std::size_t at) { return full_name(model.units[at], model.units[at].parameters[0]); };
  EXPECT_EQ(names(), (std::vector{name(0), name(3), name(2), name(1)}));
  // Two buffers with their gradients, the first of the new ones with its own, and the second.
  const MemoryOptions options{.optimizer_states = 0};
  EXPECT_EQ(memory_of(model, layout, options).moving, (4 + 4 + 2 + 2 + 2) * unit);
  // Masters are gathered, and take the place of the parameters.
  layout.compute = Dtype::bf16;
  layout.shard = 2;
  layout.what = Sharded::optimizer;
  const auto memory = memory_of(model, layout, options);
  EXPECT_EQ(memory.moving, (4 + 4 + (1 + 1 + 2) + (1 + 1)) * unit + memory.communication);
  // One that was guessed right moves nothing.
  model.units.back().shared.clear();
  model.units[1].shared = {model.units.front().parameters[0].name};
  EXPECT_EQ(names(), (std::vector{name(3), name(2), name(1), name(0)}));
}

TEST(Memory, ShardingMoreNeverNeedsMore) {
  const auto model = describe({.type = ModelType::llama, .dim = 256, .layers = 8, .heads = 8, .vocab = 4096});
  const MemoryOptions options{.tokens = 256};
  for (const int shard : {2, 4, 8}) {
    std::int64_t before = memory_of(model, {.replicate = shard}, options).total();
    for (const auto what : {Sharded::optimizer, Sharded::gradients, Sharded::parameters}) {
      const auto now = memory_of(model, {.shard = shard, .what = what, .prefetch = 1}, options).state.total();
      EXPECT_LT(now, before);
      before = now;
    }
  }
}

TEST(Table, HasEveryWayToShardOnceAndMarksTheGivenOne) {
  const auto model = toy_model({1024, 1024});
  const DataParallel layout{.replicate = 3, .shard = 4, .what = Sharded::gradients, .compute = Dtype::fp16};
  const auto rows = memory_table(model, layout, {}, 12);
  ASSERT_EQ(rows.size(), 3u * (1 + 3 * 3));  // F = 1, and 2, 4 and 12 with three choices each, in three precisions
  int given = 0;
  for (const auto& row : rows) {
    EXPECT_EQ(12 % row.shard, 0);
    EXPECT_EQ(row.shard == 1, row.what == Sharded::none);
    EXPECT_GE(row.peak, row.state.total());
    EXPECT_GE(static_cast<double>(row.state.total()), row.per_parameter.total() * 2048);
    if (row.given) {
      ++given;
      EXPECT_EQ(row.shard, 4);
      EXPECT_EQ(row.what, Sharded::gradients);
      EXPECT_STREQ(row.kind->name, "mixed, fp32 gradients");
    }
  }
  EXPECT_EQ(given, 1);
}

TEST(Fit, IsTheSmallestFactorThatFits) {
  const auto model = describe({.type = ModelType::llama, .dim = 256, .layers = 16, .heads = 8, .vocab = 4096});
  const DataParallel layout{.replicate = 8};
  const MemoryOptions options{.tokens = 128};
  const std::int64_t ddp = memory_of(model, layout, options).total();
  const auto at = [&](std::int64_t cap) { return smallest_fit(model, layout, options, cap); };
  EXPECT_EQ(at(ddp)->shard, 1);
  EXPECT_EQ(at(ddp)->bytes, ddp);
  for (const std::int64_t cap : {ddp - 1, ddp * 2 / 3, ddp / 2}) {
    const auto fit = at(cap);
    ASSERT_TRUE(fit) << cap;
    EXPECT_GT(fit->shard, 1);
    EXPECT_LE(fit->bytes, cap);
    DataParallel chosen{.replicate = 8 / fit->shard, .shard = fit->shard, .what = fit->what};
    EXPECT_EQ(memory_of(model, chosen, options).total(), fit->bytes);
    if (fit->shard == 2) continue;
    chosen = {.replicate = 16 / fit->shard, .shard = fit->shard / 2, .what = Sharded::parameters};
    EXPECT_GT(memory_of(model, chosen, options).total(), cap) << "a smaller factor would have been enough";
  }
  EXPECT_FALSE(at(1 << 20));

  const std::string words = does_not_fit(model, layout, options, ddp / 2);
  EXPECT_NE(words.find(std::to_string(ddp) + " bytes"), std::string::npos) << words;
  EXPECT_NE(
      words.find(fmt::format("shard = {}, sharded = \"{}\" would fit", at(ddp / 2)->shard, name_of(at(ddp / 2)->what))),
      std::string::npos)
      << words;
  EXPECT_NE(does_not_fit(model, layout, options, 1 << 20).find("more ranks"), std::string::npos);
}

}  // namespace
}  // namespace bonfire::plan::memory_test
