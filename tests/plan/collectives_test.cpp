#include <gtest/gtest.h>

#include <numeric>

#include <fmt/format.h>

#include "bonfire/base/error.h"
#include "bonfire/plan/layout.h"
#include "tests/plan/toy_model.h"

namespace bonfire::plan::collectives_test {
namespace {

using testing::tied_toy_model;
using testing::toy_model;

// "Gs1024 Rd8": kind (Gather, Scatter, Reduction of all, Broadcast), axis (shard, replicate, data) and bytes of each.
std::string text(const std::vector<Collective>& list) {
  std::string text;
  for (const auto& one : list) {
    const char* kind = one.kind == CollectiveKind::all_gather       ? "G"
                       : one.kind == CollectiveKind::reduce_scatter ? "S"
                       : one.kind == CollectiveKind::all_reduce     ? "R"
                                                                    : "B";
    const char* axis = one.axis == Axis::shard ? "s" : one.axis == Axis::replicate ? "r" : "d";
    text += fmt::format("{}{}{}{}", text.empty() ? "" : " ", kind, axis, one.bytes);
  }
  return text;
}

// Units a, b, c of 256, 512 and 768 elements: 1024, 2048 and 3072 bytes.
const ModelDescription abc = toy_model({256, 512, 768});
const BucketOptions each_alone{.bucket_bytes = 1, .first_bucket_bytes = 1};

TEST(Collectives, OfOneRankAreNone) {
  EXPECT_EQ(text(collectives_of_step(abc, {.what = Sharded::parameters, .microbatches = 3, .clip = true})), "");
}

TEST(Collectives, OfReplicasAreOneReductionPerBucket) {
  EXPECT_EQ(text(collectives_of_step(abc, {.replicate = 4, .microbatches = 3, .buckets = each_alone})),
            "Rr3072 Rr2048 Rr1024 Rd8");
  EXPECT_EQ(text(collectives_of_step(abc, {.replicate = 4, .buffer_bytes = 12, .clip = true})), "Rr6144 Bd12 Rd8");
}

TEST(Collectives, OfZero1ScatterOnceAndGatherWhatWasUpdated) {
  for (const int microbatches : {1, 3})
    EXPECT_EQ(
        text(collectives_of_step(
            abc,
            {.shard = 2, .what = Sharded::optimizer, .microbatches = microbatches, .buckets = each_alone, .clip = true})),
        "Ss3072 Ss2048 Ss1024 Rd8 Rs8 Gs3072 Gs2048 Gs1024");
}

TEST(Collectives, OfZero2ScatterInEveryMicrobatch) {
  DataParallel layout{.shard = 2, .what = Sharded::gradients, .microbatches = 2, .buckets = each_alone};
  EXPECT_EQ(text(collectives_of_step(abc, layout)), "Ss3072 Ss2048 Ss1024 Ss3072 Ss2048 Ss1024 Rd8 Gs3072 Gs2048 Gs1024");
  layout.accumulation = Accumulation::full;
  EXPECT_EQ(text(collectives_of_step(abc, layout)), "Ss3072 Ss2048 Ss1024 Rd8 Gs3072 Gs2048 Gs1024");
}

TEST(Collectives, OfZero3GatherBeforeForwardAndBackwardButTheLastUnitOnce) {
  const auto list = [](int prefetch, BackwardPrefetch backward = BackwardPrefetch::before_reduction) {
    return text(
        collectives_of_step(toy_model({256, 512, 768, 1024}),
                            {.shard = 2, .what = Sharded::parameters, .prefetch = prefetch, .backward_prefetch = backward}));
  };
  EXPECT_EQ(list(0), "Gs1024 Gs2048 Gs3072 Gs4096 Ss4096 Gs3072 Ss3072 Gs2048 Ss2048 Gs1024 Ss1024 Rd8");
  // While the last Unit's forward runs, the third one comes in for its backward; while that runs, the second.
  EXPECT_EQ(list(1), "Gs1024 Gs2048 Gs3072 Gs4096 Gs3072 Ss4096 Gs2048 Ss3072 Gs1024 Ss2048 Ss1024 Rd8");
  EXPECT_EQ(list(2), "Gs1024 Gs2048 Gs3072 Gs4096 Gs3072 Gs2048 Ss4096 Gs1024 Ss3072 Ss2048 Ss1024 Rd8");
  for (const int prefetch : {3, 4, 100})
    EXPECT_EQ(list(prefetch), "Gs1024 Gs2048 Gs3072 Gs4096 Gs3072 Gs2048 Gs1024 Ss4096 Ss3072 Ss2048 Ss1024 Rd8");

  const auto after = BackwardPrefetch::after_reduction;
  EXPECT_EQ(list(0, after), list(0));
  EXPECT_EQ(list(1, after), "Gs1024 Gs2048 Gs3072 Gs4096 Gs3072 Ss4096 Ss3072 Gs2048 Ss2048 Gs1024 Ss1024 Rd8");
  EXPECT_EQ(list(2, after), "Gs1024 Gs2048 Gs3072 Gs4096 Gs3072 Gs2048 Ss4096 Ss3072 Gs1024 Ss2048 Ss1024 Rd8");
}

TEST(Collectives, OfZero3KeptUntilBackwardAreOneGatherPerUnit) {
  for (const int prefetch : {0, 1, 4})
    EXPECT_EQ(text(collectives_of_step(
                  abc, {.shard = 4, .what = Sharded::parameters, .reshard_after_forward = false, .prefetch = prefetch})),
              "Gs1024 Gs2048 Gs3072 Ss3072 Ss2048 Ss1024 Rd8");
}

TEST(Collectives, OfAccumulatedZero3ScatterAsGradientsAreKept) {
  DataParallel layout{.shard = 2,
                      .what = Sharded::parameters,
                      .accumulation = Accumulation::full,
                      .microbatches = 2,
                      .reshard_after_forward = false};
  EXPECT_EQ(text(collectives_of_step(abc, layout)), "Gs1024 Gs2048 Gs3072 Gs1024 Gs2048 Gs3072 Ss3072 Ss2048 Ss1024 Rd8");
  layout.accumulation = Accumulation::sharded;
  EXPECT_EQ(text(collectives_of_step(abc, layout)),
            "Gs1024 Gs2048 Gs3072 Ss3072 Ss2048 Ss1024 Gs1024 Gs2048 Gs3072 Ss3072 Ss2048 Ss1024 Rd8");
}

// The root comes first, stays, and is reduced last.
TEST(Collectives, OfATiedWeight) {
  const auto model = tied_toy_model(1024, {256, 512, 768});
  EXPECT_EQ(text(collectives_of_step(model, {.shard = 2, .what = Sharded::parameters, .prefetch = 1})),
            "Gs4096 Gs1024 Gs2048 Gs3072 Gs2048 Ss3072 Gs1024 Ss2048 Ss1024 Ss4096 Rd8");
  EXPECT_EQ(text(collectives_of_step(model, {.replicate = 2, .buckets = each_alone})), "Rr3072 Rr2048 Rr1024 Rr4096 Rd8");
}

TEST(Collectives, OfHybridReduceTheShareAcrossReplicas) {
  const DataParallel layout{.replicate = 2, .shard = 2, .what = Sharded::parameters, .microbatches = 2, .prefetch = 0};
  EXPECT_EQ(text(collectives_of_step(toy_model({256, 512}), layout)),
            "Gs1024 Gs2048 Ss2048 Gs1024 Ss1024 "
            "Gs1024 Gs2048 Ss2048 Rr1024 Gs1024 Ss1024 Rr512 Rd8");
}

TEST(Collectives, OfDifferentTypes) {
  const DataParallel layout{.replicate = 2,
                            .shard = 2,
                            .what = Sharded::gradients,
                            .compute = Dtype::bf16,
                            .gradient = Dtype::fp32,
                            .reduction = Dtype::bf16};
  EXPECT_EQ(text(collectives_of_step(toy_model({256}), layout)), "Ss512 Rr512 Rd8 Gs512");
  auto rounded = layout;
  rounded.compression = Compression::fp16;
  EXPECT_EQ(text(collectives_of_step(toy_model({256}), rounded)), "Ss512 Rr256 Rd8 Gs512");
}

// What is frozen is gathered, but neither reduced nor sent after an update; Units before the first trained one have no
// backward.
TEST(Collectives, OfFrozenParameters) {
  auto model = toy_model({256, 512, 768});
  model.units[1].parameters[0].trained = false;
  EXPECT_EQ(text(collectives_of_step(model, {.shard = 2, .what = Sharded::parameters, .prefetch = 0})),
            "Gs1024 Gs2048 Gs3072 Ss3072 Gs2048 Gs1024 Ss1024 Rd8");
  model.units[0].parameters[0].trained = false;
  EXPECT_EQ(text(collectives_of_step(model, {.shard = 2, .what = Sharded::parameters, .prefetch = 0})),
            "Gs1024 Gs2048 Gs3072 Ss3072 Rd8");
  EXPECT_EQ(text(collectives_of_step(model, {.shard = 2, .what = Sharded::optimizer, .buckets = each_alone})),
            "Ss3072 Rd8 Gs3072");
}

TEST(Collectives, CompressionMakesThemSmaller) {
  const auto model = describe({.type = ModelType::mlp, .dim = 64, .layers = 2, .ffn = 128, .vocab = 256});
  const auto sum = [&](Compression compression) {
    const auto list = collectives_of_step(model, {.replicate = 2, .compression = compression, .powersgd_rank = 2});
    return std::accumulate(list.begin(), list.end() - 1, std::int64_t{0},
                           [](auto total, const auto& one) { return total + one.bytes; });
  };
  EXPECT_EQ(sum(Compression::bf16) * 2, sum(Compression::none));
  EXPECT_EQ(sum(Compression::fp16), sum(Compression::bf16));
  EXPECT_LT(sum(Compression::powersgd) * 4, sum(Compression::none));
}

TEST(Collectives, RefuseWhatCannotBe) {
  EXPECT_THROW(collectives_of_step(abc, {.shard = 2}), ConfigError);
  EXPECT_THROW(collectives_of_step(abc, {.shard = 4, .what = Sharded::parameters, .reshard_ranks = 3}), ConfigError);
  EXPECT_THROW(collectives_of_step(abc, {.shard = 2, .what = Sharded::optimizer, .compression = Compression::powersgd}),
               ConfigError);
}

// What a step moves beside the mean of the loss.
double moved(const ModelDescription& model, const DataParallel& layout) {
  return bytes_moved(model, layout) - bus_factor(CollectiveKind::all_reduce, layout.ranks()) * 8;
}

// The laws people know, over every kind of model, on padded sizes too.
class BytesMoved : public ::testing::TestWithParam<ModelSpec> {
 protected:
  ModelDescription model = describe(GetParam());
};

TEST_P(BytesMoved, AreThoseOfReplicasWhereOnlyStateOrGradientsAreSharded) {
  for (const int ranks : {2, 4, 6}) {
    const double replicas = moved(model, {.replicate = ranks});
    for (int shard = 2; shard <= ranks; ++shard) {
      if (ranks % shard != 0) continue;
      for (const auto what : {Sharded::optimizer, Sharded::gradients}) {
        const double sharded = moved(model, {.replicate = ranks / shard, .shard = shard, .what = what});
        EXPECT_NEAR(sharded, replicas, 1e-9 * replicas) << ranks << " ranks, F = " << shard << ", " << name_of(what);
      }
    }
  }
}

TEST_P(BytesMoved, AreHalfAsManyAgainWithShardedParametersLessWhatStays) {
  for (const int ranks : {2, 4}) {
    const DataParallel sharded{.shard = ranks, .what = Sharded::parameters};
    // Each Unit padded by itself, as sharded ones are.
    const double replicas = moved(model, {.replicate = ranks, .buckets = each_alone});
    std::int64_t stays = flats_of(model, sharded).front().bytes;  // the last Unit's
    if (model.units.front().kind == UnitKind::root) stays += flats_of(model, sharded).back().bytes;
    const double gather = bus_factor(CollectiveKind::all_gather, ranks);
    EXPECT_NEAR(moved(model, sharded), 1.5 * replicas - gather * static_cast<double>(stays), 1e-9 * replicas);

    auto kept = sharded;
    kept.reshard_after_forward = false;
    EXPECT_NEAR(moved(model, kept), replicas, 1e-9 * replicas);
    EXPECT_EQ(bytes_moved(collectives_of_step(model, sharded), sharded), bytes_moved(model, sharded));
  }
}

INSTANTIATE_TEST_SUITE_P(
    EveryModel, BytesMoved,
    ::testing::Values(ModelSpec{.type = ModelType::llama, .dim = 20, .layers = 2, .heads = 2, .ffn = 23, .vocab = 41},
                      ModelSpec{.type = ModelType::gpt2, .dim = 18, .layers = 3, .heads = 2, .vocab = 41, .tied = true},
                      ModelSpec{.type = ModelType::mlp, .dim = 17, .layers = 2, .inputs = 13, .classes = 5},
                      ModelSpec{.type = ModelType::vgg,
                                .ffn = 17,
                                .classes = 5,
                                .image = 8,
                                .channels = 1,
                                .pool = 2,
                                .convolutions = {5, 0, 7, 0}}),
    [](const auto& info) { return name_of(info.param.type); });

// Resharded to groups of two out of four, what comes back in backward crosses half of the link instead of three quarters.
TEST(BytesMovedToFewer, AreFewer) {
  const auto model = toy_model({256, 512});
  const DataParallel all{.shard = 4, .what = Sharded::parameters};
  auto two = all;
  two.reshard_ranks = 2;
  EXPECT_EQ(collectives_of_step(model, two), collectives_of_step(model, all));
  EXPECT_DOUBLE_EQ(bytes_moved(model, all) - bytes_moved(model, two), 1024 * (0.75 - 0.5));
  auto one = all;
  one.reshard_ranks = 1;
  auto kept = all;
  kept.reshard_after_forward = false;
  EXPECT_EQ(collectives_of_step(model, one), collectives_of_step(model, kept));
}

}  // namespace
}  // namespace bonfire::plan::collectives_test
