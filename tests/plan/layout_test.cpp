#include "bonfire/plan/layout.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "bonfire/base/error.h"

namespace bonfire::plan::layout_test {
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

// While a buffer is made what goes into it exists twice, trained or not: frozen Units do not pile up in one.
TEST(Bucket, CountsFrozenParametersToo) {
  std::vector<ParameterGroup> groups;
  for (int i = 0; i < 7; ++i) groups.push_back(group("g" + std::to_string(i), {128}, i == 0));
  const auto buckets = bucket(groups, {.bucket_bytes = 1024, .first_bucket_bytes = 512});
  ASSERT_EQ(buckets.size(), 4u);
  EXPECT_EQ(buckets[1].groups, (std::vector<std::size_t>{1, 2}));
  EXPECT_FALSE(buckets[1].any_trained());
}

// In one buffer, each with its kind: split weights, whole ones beside them, and every tied weight by itself.
TEST(Bucket, KeepsWhatIsHeldElsewhereInRegionsOfItsOwn) {
  auto all = group("a", {100, 200, 300, 400, 500});
  all.parameters[0].placement = {.shape = {200}, .boxes = {Box{{100}, {200}}}};
  all.parameters[1].placement = {.tie = "one"};
  all.parameters[2].placement = {.tie = "other", .copy = 1};
  const auto buckets = bucket({all}, {.parts = 2});
  ASSERT_EQ(buckets.size(), 1u);
  const auto& [groups, segments, regions, bytes] = buckets[0];
  ASSERT_EQ(regions.size(), 4u);
  EXPECT_EQ(segments[3].region, segments[4].region);
  EXPECT_TRUE(regions[segments[0].region].split);
  EXPECT_FALSE(regions[segments[3].region].split);
  EXPECT_EQ(regions[segments[1].region].tie, "one");
  EXPECT_EQ(regions[segments[2].region].tie, "other");
  EXPECT_EQ(regions[segments[2].region].copy, 1);
  EXPECT_EQ(segments[0].placement.name, "a0");
  EXPECT_EQ(segments[4].placement.boxes, std::vector<Box>{whole_box({500})});
}

TEST(Groups, WithNothingToReduceComeLast) {
  auto model = describe({.type = ModelType::mlp, .dim = 64, .layers = 3, .inputs = 64, .classes = 64});
  for (auto& parameter : model.units[2].parameters) parameter.trained = false;
  std::vector<std::string> names;
  for (const auto& group : groups_in_backward_order(model)) names.push_back(group.name);
  EXPECT_EQ(names, (std::vector<std::string>{"head", "blocks.2", "blocks.0", "embedding", "blocks.1"}));
}

// Whatever the sizes and types: every parameter has its own aligned place in a region of its kind, trained regions come
// first, and each region can be cut into equal parts.
TEST(Bucket, PlacesEverythingOnceAlignedAndPadded) {
  for (const int parts : {1, 2, 3, 8}) {
    std::vector<ParameterGroup> groups{group("a", {1, 7, 1000}), group("b", {64}, false), group("c", {3, 65})};
    groups[0].parameters[1].trained = false;
    groups[2].parameters[0].compute = Dtype::bf16;
    const auto buckets = bucket(groups, {.bucket_bytes = 1 << 20, .first_bucket_bytes = 1 << 20, .parts = parts});
    ASSERT_EQ(buckets.size(), 1u);
    const auto& flat = buckets[0];
    ASSERT_EQ(flat.segments.size(), 6u);
    ASSERT_EQ(flat.regions.size(), 3u);
    std::int64_t begin = 0, trained = 0;
    for (std::size_t at = 0; at < flat.regions.size(); ++at) {
      const auto& region = flat.regions[at];
      EXPECT_EQ(region.begin, begin);
      EXPECT_EQ(region.elements % (segment_alignment * parts), 0);
      begin += region.bytes();
      trained += region.trained ? region.elements : 0;
      EXPECT_TRUE(at == 0 || flat.regions[at - 1].trained || !region.trained);
      std::int64_t end = 0;
      for (const auto& segment : flat.segments) {
        if (segment.region != at) continue;
        EXPECT_GE(segment.offset, end);
        EXPECT_EQ(segment.offset % segment_alignment, 0);
        end = segment.offset + segment.elements;
      }
      EXPECT_LE(end, region.elements);
      EXPECT_GT(end, 0);
    }
    EXPECT_EQ(flat.bytes, begin);
    EXPECT_EQ(flat.trained_elements(), trained);
    for (const auto& given : groups)
      for (const auto& parameter : given.parameters) {
        const auto at = std::find_if(flat.segments.begin(), flat.segments.end(),
                                     [&](const Segment& segment) { return segment.name == parameter.name; });
        ASSERT_NE(at, flat.segments.end());
        EXPECT_EQ(at->elements, parameter.elements);
        EXPECT_EQ(flat.regions[at->region].trained, parameter.trained);
        EXPECT_EQ(flat.regions[at->region].compute, parameter.compute);
      }
  }
}

TEST(Bucket, OnePerGroupWhereBuffersComeAndGoWithTheirUnits) {
  const auto buckets = bucket({group("a", {1}), group("b", {2}), group("c", {3})}, {.one_per_group = true});
  ASSERT_EQ(buckets.size(), 3u);
  for (std::size_t at = 0; at < 3; ++at) EXPECT_EQ(buckets[at].groups, (std::vector<std::size_t>{at}));
}

TEST(Bucket, RefusesWhatMakesNoSense) {
  EXPECT_THROW(bucket({group("a", {1})}, {.bucket_bytes = 0}), Error);
  EXPECT_THROW(bucket({group("a", {1})}, {.parts = 0}), Error);
  EXPECT_TRUE(bucket({}, {}).empty());
}

TEST(Flats, HaveTheTypesOfTheLayout) {
  const auto model = describe({.type = ModelType::llama, .dim = 64, .layers = 1, .heads = 4, .ffn = 128, .vocab = 256});
  const DataParallel layout{
      .shard = 2, .what = Sharded::parameters, .compute = Dtype::bf16, .keep = [](const std::string& name) {
        return name.find("norm") != std::string::npos;
      }};
  const auto flats = flats_of(model, layout);
  ASSERT_EQ(flats.size(), 3u);
  for (const auto& flat : flats)
    for (const auto& segment : flat.segments) {
      const bool norm = segment.name.find("norm") != std::string::npos;
      EXPECT_EQ(flat.regions[segment.region].compute, norm ? Dtype::fp32 : Dtype::bf16) << segment.name;
      EXPECT_EQ(flat.regions[segment.region].master, Dtype::fp32);
    }
}

TEST(LowRank, OnlyWhereItHelps) {
  EXPECT_EQ(low_rank({100}, 4).rank, 0);
  EXPECT_EQ(low_rank({100, 50}, 4).rank, 4);
  EXPECT_EQ(low_rank({8, 3, 3, 3}, 4).columns, 27);
  EXPECT_EQ(low_rank({4, 4}, 4).rank, 0);
  EXPECT_EQ(low_rank({2, 1000}, 4).rank, 0);  // two rows: the factors would be as large as the matrix
}

}  // namespace
}  // namespace bonfire::plan::layout_test
