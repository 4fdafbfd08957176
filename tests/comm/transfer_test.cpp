#include <gtest/gtest.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include "bonfire/base/error.h"
#include "bonfire/comm/group.h"
#include "bonfire/comm/recorder.h"
#include "tests/support/ranks.h"

namespace bonfire::transfer_test {
namespace {

using testing::run_ranks;

// Small whole numbers, which every dtype and every sum of them holds exactly.
at::Tensor value(int rank, std::int64_t elements, at::ScalarType dtype) {
  return at::arange(elements, at::kLong).remainder(5).add(rank + 1).to(dtype);
}

at::Tensor sum_over(int ranks, std::int64_t elements, at::ScalarType dtype) {
  auto sum = at::zeros({elements}, at::kDouble);
  for (int rank = 0; rank < ranks; ++rank) sum.add_(value(rank, elements, at::kDouble));
  return sum.to(dtype);
}

at::Tensor gathered_from(int ranks, std::int64_t part, at::ScalarType dtype) {
  std::vector<at::Tensor> values;
  for (int rank = 0; rank < ranks; ++rank) values.push_back(value(rank, part, dtype));
  return at::cat(values);
}

// Sizes and dtypes that share nothing; one is empty.
const std::vector<std::pair<std::int64_t, at::ScalarType>> kKinds{{7, at::kFloat},  {300, at::kBFloat16}, {0, at::kFloat},
                                                                  {1, at::kDouble}, {64, at::kHalf},      {9, at::kLong}};

class Transfers : public ::testing::TestWithParam<std::tuple<int, bool>> {
 protected:
  int ranks() const { return std::get<0>(GetParam()); }
  bool in_place() const { return std::get<1>(GetParam()); }

  at::Tensor part_of(const at::Tensor& whole, int rank) const {
    const auto elements = whole.numel() / ranks();
    return in_place() ? whole.narrow(0, rank * elements, elements) : at::empty({elements}, whole.options());
  }
};

TEST_P(Transfers, SeveralGathersAreOneCollective) {
  run_ranks(ranks(), [&](World& world) {
    const Group& group = world.group();
    std::vector<Transfer> transfers;
    std::int64_t bytes = 0;
    auto kinds = kKinds;
    kinds.emplace_back(11, at::kByte);
    for (const auto& [part, dtype] : kinds) {
      auto whole = at::zeros({part * ranks()}, dtype);
      auto own = part_of(whole, group.rank());
      own.copy_(value(group.rank(), part, dtype));
      bytes += static_cast<std::int64_t>(whole.nbytes());
      transfers.push_back({whole, own});
    }
    world.recorder().start();
    group.all_gather(transfers).wait();
    world.recorder().stop();
    for (std::size_t at = 0; at < kinds.size(); ++at) {
      const auto& [part, dtype] = kinds[at];
      EXPECT_TRUE(at::equal(transfers[at].whole, gathered_from(ranks(), part, dtype))) << c10::toString(dtype);
      EXPECT_TRUE(at::equal(transfers[at].part, value(group.rank(), part, dtype))) << c10::toString(dtype);
    }
    std::vector<Collective> want;
    if (ranks() > 1) want.push_back({CollectiveKind::all_gather, Axis::world, bytes});
    EXPECT_EQ(world.recorder().collectives(), want);
    for (const auto& record : world.recorder().records()) EXPECT_GE(record.end, record.start);
  });
}

TEST_P(Transfers, SeveralReductionsAreOneCollective) {
  run_ranks(ranks(), [&](World& world) {
    const Group& group = world.group();
    for (const Reduce op : {Reduce::sum, Reduce::max}) {
      std::vector<Transfer> transfers;
      std::int64_t bytes = 0;
      for (const auto& [part, dtype] : kKinds) {
        auto whole = value(group.rank(), part * ranks(), dtype);
        bytes += static_cast<std::int64_t>(whole.nbytes());
        transfers.push_back({whole, part_of(whole, group.rank())});
      }
      world.recorder().clear();
      world.recorder().start();
      group.reduce_scatter(transfers, op).wait();
      world.recorder().stop();
      for (std::size_t at = 0; at < kKinds.size(); ++at) {
        const auto& [part, dtype] = kKinds[at];
        const auto all =
            op == Reduce::sum ? sum_over(ranks(), part * ranks(), dtype) : value(ranks() - 1, part * ranks(), dtype);
        EXPECT_TRUE(at::equal(transfers[at].part, all.narrow(0, part * group.rank(), part))) << c10::toString(dtype);
      }
      std::vector<Collective> want;
      if (ranks() > 1) want.push_back({CollectiveKind::reduce_scatter, Axis::world, bytes});
      EXPECT_EQ(world.recorder().collectives(), want);
    }
  });
}

TEST_P(Transfers, OneAloneIsTheSameAsEver) {
  run_ranks(ranks(), [&](World& world) {
    const Group& group = world.group();
    auto whole = at::zeros({5 * ranks()});
    auto part = part_of(whole, group.rank());
    part.copy_(value(group.rank(), 5, at::kFloat));
    group.all_gather(whole, part).wait();
    EXPECT_TRUE(at::equal(whole, gathered_from(ranks(), 5, at::kFloat)));
    group.reduce_scatter(part, whole, Reduce::average).wait();
    EXPECT_TRUE(at::equal(part, value(group.rank(), 5, at::kFloat)));  // all ranks had the same
  });
}

INSTANTIATE_TEST_SUITE_P(All, Transfers, ::testing::Combine(::testing::Values(1, 2, 3, 4), ::testing::Bool()),
                         [](const auto& info) {
                           return "ranks" + std::to_string(std::get<0>(info.param)) +
                                  (std::get<1>(info.param) ? "_in_place" : "");
                         });

TEST(Transfer, NothingToMoveIsNoCollective) {
  run_ranks(2, [](World& world) {
    world.recorder().start();
    const std::vector<Transfer> empty{{at::empty({0}), at::empty({0})},
                                      {at::empty({0}, at::kHalf), at::empty({0}, at::kHalf)}};
    Work work = world.group().all_gather(std::span<const Transfer>());
    EXPECT_TRUE(work.done());
    work = world.group().reduce_scatter(empty);
    EXPECT_TRUE(work.done());
    work.wait();
    EXPECT_TRUE(world.recorder().records().empty());
  });
}

// An overlap that is not in place would be read while it is written.
TEST(Transfer, AnotherOverlapThanInPlaceIsRefused) {
  run_ranks(2, [](World& world) {
    const Group& group = world.group();
    auto whole = at::zeros({8});
    for (const auto start : {(1 - group.rank()) * 4, 2}) {
      try {
        group.all_gather(whole, whole.narrow(0, start, 4)).wait();
        FAIL() << start;
      } catch (const Error& error) {
        EXPECT_NE(std::string(error.what()).find("which is this rank's own"), std::string::npos) << error.what();
      }
    }
    // Neighbours in one buffer do not overlap.
    auto buffer = at::full({12}, world.rank() + 1.0, at::kFloat);
    group.all_gather(buffer.narrow(0, 4, 8), buffer.narrow(0, 0, 4)).wait();
    EXPECT_EQ(buffer.sum().item<float>(), 4 * (world.rank() + 1) + 4 * 1 + 4 * 2);
  });
}

TEST(Transfer, AGroupOfOneLeavesSharedMemoryAlone) {
  const World world;
  auto whole = at::ones({4});
  const auto version = whole._version();
  world.group().all_gather(whole, whole.view(-1)).wait();
  world.group().reduce_scatter(whole.view(-1), whole).wait();
  EXPECT_EQ(whole._version(), version);  // nobody has written
}

TEST(Transfer, DebugModeComparesAllOfThem) {
  std::string message;
  run_ranks(
      2,
      [&](World& world) {
        const auto odd = world.rank() == 1 ? at::kHalf : at::kBFloat16;
        const std::vector<Transfer> transfers{{at::zeros({4}), at::zeros({2})}, {at::zeros({6}, odd), at::zeros({3}, odd)}};
        try {
          world.group().reduce_scatter(transfers).wait();
        } catch (const Error& error) {
          if (world.rank() == 0) message = error.what();
        }
      },
      {.debug = true});
  EXPECT_NE(message.find("reduce_scatter of Float [4] and BFloat16 [6], sum"), std::string::npos) << message;
  EXPECT_NE(message.find("reduce_scatter of Float [4] and Half [6], sum"), std::string::npos) << message;
}

}  // namespace
}  // namespace bonfire::transfer_test
