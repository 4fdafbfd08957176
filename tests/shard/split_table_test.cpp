#include "bonfire/shard/split_table.h"

#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include "bonfire/base/error.h"
#include "bonfire/plan/box.h"
#include "tests/support/ranks.h"
#include "tests/support/thrown.h"

namespace bonfire::split_table_test {
namespace {
using testing::expect_part;
using testing::run_ranks;
using testing::thrown;

// What a rank owns is what its placement says it is, of whatever is split.
TEST(SplitTable, PlacementsSayWhatRanksOwn) {
  run_ranks(2, [](World& world) {
    const SplitTable table(world.mesh({.tensor = 2}), {{.match = "qkv.*", .parts = {4, 2, 2}},
                                                       {.match = "*.down", .split = Split::columns},
                                                       {.match = "b*.up.*"},
                                                       {.match = "*.whole", .split = Split::whole},
                                                       {.match = "*", .split = Split::columns}});
    const auto numbers = [](at::IntArrayRef sizes) { return at::arange(c10::multiply_integers(sizes)).view(sizes); };
    struct Given {
      const char* name;
      at::Tensor whole;
      std::size_t boxes;
    };
    for (const auto& [name, whole, boxes] : {Given{"qkv.weight", numbers({8, 3}), 3}, Given{"qkv.bias", numbers({8}), 3},
                                             Given{"a.down", numbers({3, 4}), 1}, Given{"bb.up.weight", numbers({6, 2}), 1},
                                             Given{"b.up.bias", numbers({6}), 1}, Given{"up", numbers({2, 2, 3}), 1}}) {
      const auto own = table.own(name, whole);
      const auto placement = table.placement()(name, own);
      EXPECT_EQ(placement.shape, whole.sizes().vec()) << name;
      ASSERT_EQ(placement.boxes.size(), boxes) << name;
      std::vector<at::Tensor> pieces;
      for (const auto& box : placement.boxes) {
        at::Tensor piece = whole;
        for (std::size_t dim = 0; dim < box.begin.size(); ++dim)
          piece = piece.slice(static_cast<std::int64_t>(dim), box.begin[dim], box.end[dim]);
        pieces.push_back(piece);
      }
      EXPECT_TRUE(at::cat(pieces).equal(own)) << name;
      EXPECT_EQ(own.numel() * 2, whole.numel()) << name;
    }
    const auto whole = numbers({3, 3});
    EXPECT_TRUE(table.own("a.whole", whole).equal(whole));
    EXPECT_FALSE(table.placement()("a.whole", whole).split());
  });
}

TEST(SplitTable, RefusesWhatRanksDoNotDivide) {
  run_ranks(2, [](World& world) {
    const SplitTable table(world.mesh({.tensor = 2}),
                           {{.match = "up"}, {.match = "down", .split = Split::columns}, {.match = "qkv", .parts = {4, 2}}});
    const auto refused = [&](const char* name, at::IntArrayRef sizes) {
      return thrown<ConfigError>([&] { table.own(name, at::zeros(sizes)); });
    };
    expect_part(refused("up", {3, 2}), "parameter 'up': 3 rows over 2 ranks; allowed: a multiple of 2");
    expect_part(refused("down", {2, 3}), "parameter 'down': 3 columns over 2 ranks; allowed: a multiple of 2");
    expect_part(refused("down", {2}), "parameter 'down' has 1 dimensions; allowed for its split: 2 or more");
    expect_part(refused("qkv", {8, 2}), "parameter 'qkv' has 8 rows, its rule's parts 6; allowed: as many");
  });
}

}  // namespace
}  // namespace bonfire::split_table_test
