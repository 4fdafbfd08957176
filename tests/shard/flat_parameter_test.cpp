#include "bonfire/shard/flat_parameter.h"

#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include "bonfire/base/error.h"
#include "tests/shard/twins.h"

namespace bonfire::flat_parameter_test {
namespace {

using testing::numbers;
using testing::run_ranks;

constexpr int ranks = 4;

// Sizes that divide nothing, one smaller than the ranks; two that are frozen and one that forward reads in its own type.
std::vector<plan::ParameterSize> sizes() {
  std::vector<plan::ParameterSize> list;
  const std::vector<std::vector<std::int64_t>> shapes{{7, 5}, {3}, {130}, {1}, {11, 13}};
  for (std::size_t at = 0; at < shapes.size(); ++at) {
    plan::ParameterSize one{.name = fmt::format("p{}", at), .elements = 1, .shape = shapes[at]};
    for (const auto extent : shapes[at]) one.elements *= extent;
    one.trained = at != 1 && at != 4;
    one.compute = at == 2 ? plan::Dtype::fp32 : plan::Dtype::bf16;
    list.push_back(std::move(one));
  }
  return list;
}

plan::FlatLayout layout() { return plan::bucket({{"unit", sizes()}}, {.parts = ranks}).front(); }

// In the order of the layout's segments.
std::vector<at::Tensor> parameters(const plan::FlatLayout& layout) {
  std::vector<at::Tensor> tensors;
  for (const auto& segment : layout.segments)
    for (const auto& one : sizes())
      if (one.name == segment.name)
        tensors.push_back(
            numbers(one.shape, static_cast<std::uint64_t>(one.elements), at::kFloat).set_requires_grad(one.trained));
  return tensors;
}

TEST(FlatParameter, SegmentsAndSharesAreAligned) {
  const auto flat = layout();
  ASSERT_EQ(flat.segments.size(), 5u);
  std::vector<std::int64_t> ends(flat.regions.size());
  for (const auto& segment : flat.segments) {
    EXPECT_EQ(segment.offset % plan::segment_alignment, 0) << segment.name;
    EXPECT_GE(segment.offset, ends[segment.region]) << segment.name << " lies over the one before";
    ends[segment.region] = segment.offset + segment.elements;
  }
  std::int64_t bytes = 0;
  for (std::size_t at = 0; at < flat.regions.size(); ++at) {
    const auto& region = flat.regions[at];
    EXPECT_EQ(region.begin, bytes);
    EXPECT_LE(ends[at], region.elements);
    EXPECT_EQ(region.elements % (ranks * plan::segment_alignment), 0) << "a rank's share begins anywhere";
    bytes += region.bytes();
    EXPECT_TRUE(at == 0 || region.trained <= flat.regions[at - 1].trained) << "trained ones come first";
  }
  EXPECT_EQ(flat.bytes, bytes);
}

// Laws: the parameters are views that are made once, the whole is every rank's share in a row, and what was freed comes back.
TEST(FlatParameter, ComesAndGoesUnderTheSameViews) {
  run_ranks(ranks, [](World& world) {
    const auto plan = layout();
    const auto members = parameters(plan);
    std::vector<at::Tensor> expected;
    for (std::size_t at = 0; at < members.size(); ++at)
      expected.push_back(members[at].detach().to(scalar_type(plan.regions[plan.segments[at].region].compute)).clone());
    const Mesh mesh = world.mesh({.shard = ranks});
    BufferPool pool(at::kCPU);
    FlatParameter flat(plan, members, {.factors = {ranks, ranks, ranks}, .rank = world.rank()});
    EXPECT_FALSE(flat.present());
    for (std::size_t at = 0; at < plan.regions.size(); ++at)
      EXPECT_EQ(flat.held(at).numel() * ranks, plan.regions[at].elements);
    std::int64_t masters = 0;
    for (const auto& share : flat.trained()) {
      EXPECT_EQ(share.master.scalar_type(), at::kFloat);
      EXPECT_EQ(share.low_precision().defined(), plan.regions[share.region].compute == plan::Dtype::bf16);
      masters += share.master.numel();
    }
    EXPECT_EQ(masters * ranks, plan.trained_elements());

    const auto* const storage = members[0].storage().unsafeGetStorageImpl();
    for (int round = 0; round < 3; ++round) {
      EXPECT_THROW(static_cast<void>(storage->data()), c10::Error) << "the memory is freed";
      flat.bring_in(pool, {.group = mesh.gathers(), .place = 0});
      flat.await();
      EXPECT_TRUE(flat.present());
      for (std::size_t at = 0; at < members.size(); ++at) {
        const auto& name = plan.segments[at].name;
        EXPECT_EQ(members[at].storage().unsafeGetStorageImpl(), storage) << name;
        EXPECT_TRUE(members[at].is_same(flat.parameters()[at])) << name;
        EXPECT_TRUE(at::equal(members[at], expected[at])) << name;
        EXPECT_EQ(flat.parameter_in(members[at]), name);
        // Memory of the pool begins at a multiple of 64 bytes.
        EXPECT_EQ(reinterpret_cast<std::uintptr_t>(members[at].data_ptr()) % 64, 0u) << name;
      }
      EXPECT_EQ(pool.lent(), 1u);
      flat.let_go();
      EXPECT_FALSE(flat.present());
      EXPECT_EQ(pool.lent(), 0u);
    }
    EXPECT_EQ(pool.bytes(), plan.bytes + (512 - plan.bytes % 512) % 512) << "one buffer, made once";
    EXPECT_NO_THROW(flat.require_intact());
  });
}

TEST(FlatParameter, WhatIsPinnedStays) {
  run_ranks(2, [](World& world) {
    const auto plan = plan::bucket({{"unit", sizes()}}, {.parts = 2}).front();
    BufferPool pool(at::kCPU);
    FlatParameter flat(plan, parameters(plan), {.factors = {2, 2, 2}, .rank = world.rank()});
    flat.bring_in(pool, {.group = world.mesh({.shard = 2}).gathers()});
    flat.pin();
    flat.let_go();
    EXPECT_TRUE(flat.present());
    flat.unpin();
    flat.let_go();
    EXPECT_FALSE(flat.present());
  });
}

// Autograd's counter and our own see the same changes.
TEST(FlatParameter, GenerationsCountChangesOfTheValues) {
  const auto plan = layout();
  const auto members = parameters(plan);
  FlatParameter flat(plan, members, {});
  EXPECT_TRUE(flat.present()) << "where nothing is divided the memory is always in";
  const auto generation = flat.generation();
  const auto version = members[0]._version();
  flat.values_changed();
  EXPECT_EQ(flat.generation(), generation + 1);
  EXPECT_GT(members[0]._version(), version);
  {
    const at::NoGradGuard no_grad;
    members[0].add_(1);
  }
  flat.take_values();
  EXPECT_EQ(flat.generation(), generation + 2);
}

// What was changed while the memory was in is kept, and only that: a master keeps what rounding has taken away.
TEST(FlatParameter, MastersTakeWhatWasChanged) {
  const auto plan = layout();
  const auto members = parameters(plan);
  FlatParameter flat(plan, members, {});
  const auto& share = flat.trained().front();
  ASSERT_TRUE(share.low_precision().defined());
  const auto before = share.master.clone();
  ASSERT_FALSE(at::equal(before, share.low_precision().to(at::kFloat))) << "rounding took nothing away";
  flat.take_values();
  EXPECT_TRUE(at::equal(share.master, before));
  {
    const at::NoGradGuard no_grad;
    flat.region(share.region).narrow(0, 3, 1).fill_(2);
  }
  flat.take_values();
  EXPECT_EQ(share.master[3].item<float>(), 2.0f);
  EXPECT_TRUE(at::equal(share.master.narrow(0, 4, 20), before.narrow(0, 4, 20)));
}

TEST(FlatParameter, AnotherShapeIsNamed) {
  const auto plan = layout();
  const auto members = parameters(plan);
  FlatParameter flat(plan, members, {});
  const auto at = flat.segment("p0");
  members[at].unsafeGetTensorImpl()->set_sizes_contiguous({5, 7});
  try {
    flat.require_intact();
    FAIL() << "not noticed";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("parameter 'p0' was given another shape"), std::string::npos) << error.what();
  }
  EXPECT_THROW(flat.segment("p9"), Error);
}

}  // namespace
}  // namespace bonfire::flat_parameter_test
