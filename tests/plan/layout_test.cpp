#include "bonfire/plan/layout.h"

#include <gtest/gtest.h>

#include <numeric>

#include "bonfire/base/error.h"

namespace bonfire::plan {
namespace {

ParameterGroup group(const std::string& name, std::vector<std::int64_t> elements, bool trained = true) {
  ParameterGroup group{name, {}};
  for (std::size_t at = 0; at < elements.size(); ++at)
    group.parameters.push_back({name + std::to_string(at), elements[at], {elements[at]}, trained});
  return group;
}

TEST(Bucket, ClosesWhenItsSizeIsReached) {
  std::vector<ParameterGroup> groups;
  for (int i = 0; i < 7; ++i)
    groups.push_back(group("g" + std::to_string(i), {100}));  // 128 elements each with padding: 512 bytes
  const auto buckets = bucket(groups, {.bucket_bytes = 1200, .first_bucket_bytes = 500});
  ASSERT_EQ(buckets.size(), 3u);
  EXPECT_EQ(buckets[0].groups, (std::vector<std::size_t>{0}));
  EXPECT_EQ(buckets[1].groups, (std::vector<std::size_t>{1, 2, 3}));
  EXPECT_EQ(buckets[2].groups, (std::vector<std::size_t>{4, 5, 6}));
}

// Whatever the sizes: every parameter has its own aligned place, trained ones first, and sizes divide by the factor.
TEST(Bucket, PlacesEverythingOnceAlignedAndPadded) {
  for (const int shard : {1, 2, 3, 8}) {
    std::vector<ParameterGroup> groups{group("a", {1, 7, 1000}), group("b", {64}, false), group("c", {3, 65})};
    groups[0].parameters[1].trained = false;
    const auto buckets = bucket(groups, {.bucket_bytes = 1 << 20, .first_bucket_bytes = 1 << 20, .shard = shard});
    ASSERT_EQ(buckets.size(), 1u);
    const auto& flat = buckets[0];
    ASSERT_EQ(flat.segments.size(), 6u);
    std::int64_t end = 0;
    bool frozen = false;
    for (const auto& segment : flat.segments) {
      EXPECT_GE(segment.offset, end);
      EXPECT_EQ(segment.offset % segment_alignment, 0);
      EXPECT_TRUE(segment.trained || segment.offset >= flat.trained);
      EXPECT_TRUE(!segment.trained || segment.offset + segment.elements <= flat.trained);
      EXPECT_FALSE(frozen && segment.trained);
      frozen = frozen || !segment.trained;
      end = segment.offset + segment.elements;
    }
    EXPECT_LE(end, flat.total);
    EXPECT_EQ(flat.trained % (segment_alignment * shard), 0);
    EXPECT_EQ(flat.total % (segment_alignment * shard), 0);
  }
}

TEST(Bucket, RefusesWhatMakesNoSense) {
  EXPECT_THROW(bucket({group("a", {1})}, {.bucket_bytes = 0}), Error);
  EXPECT_THROW(bucket({group("a", {1})}, {.shard = 0}), Error);
  EXPECT_TRUE(bucket({}, {}).empty());
}

TEST(Collectives, OfAStepMoveEachTrainedElementOnce) {
  const auto model = describe({.type = ModelType::llama, .dim = 64, .layers = 3, .heads = 4, .ffn = 128, .vocab = 256});
  EXPECT_TRUE(collectives_of_step(model, {.replicate = 1}).empty());

  const auto list = collectives_of_step(model, {.replicate = 4, .buckets = {.bucket_bytes = 1, .first_bucket_bytes = 1}});
  ASSERT_EQ(list.size(), 3u + 2 + 1);  // blocks, embedding and head, the loss
  std::int64_t bytes = 0;
  for (const auto& one : list) {
    EXPECT_EQ(one.kind, CollectiveKind::all_reduce);
    if (one.axis == Axis::replicate) bytes += one.bytes;
  }
  EXPECT_EQ(bytes, 4 * model.parameter_elements());  // every size here is a multiple of the alignment
  EXPECT_EQ(list.back(), (Collective{CollectiveKind::all_reduce, Axis::data, 8}));
  // Backward begins at the head: its norm and its product.
  EXPECT_EQ(list.front().bytes, 4 * (64 + 256 * 64));
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

TEST(LowRank, OnlyWhereItHelps) {
  EXPECT_EQ(low_rank({100}, 4).rank, 0);
  EXPECT_EQ(low_rank({100, 50}, 4).rank, 4);
  EXPECT_EQ(low_rank({8, 3, 3, 3}, 4).columns, 27);
  EXPECT_EQ(low_rank({4, 4}, 4).rank, 0);
  EXPECT_EQ(low_rank({2, 1000}, 4).rank, 0);  // two rows: the factors would be as large as the matrix
}

}  // namespace
}  // namespace bonfire::plan
