#include "bonfire/plan/box.h"

#include <gtest/gtest.h>

#include <map>
#include <random>

namespace bonfire::box_test {
namespace {

std::vector<CommonRun> runs(const Piece& one, const Piece& other) {
  std::vector<CommonRun> all;
  for_each_common_run(one, other, [&](const CommonRun& run) { all.push_back(run); });
  return all;
}

Piece all_of(Box box) {
  const std::int64_t count = elements_of(box);
  return {std::move(box), 0, count};
}

using Runs = std::vector<CommonRun>;

TEST(Box, WholeTensorsAreOneRun) {
  const Piece whole = all_of(whole_box({4, 5, 6}));
  EXPECT_EQ(runs(whole, whole), (Runs{{0, 0, 120}}));
  EXPECT_EQ(runs({whole.box, 30, 50}, {whole.box, 40, 80}), (Runs{{10, 0, 40}}));
  EXPECT_EQ(runs({whole.box, 0, 30}, {whole.box, 30, 90}), Runs{});
}

TEST(Box, ScalarsAreOneElement) {
  const Piece scalar = all_of(whole_box({}));
  EXPECT_EQ(elements_of(scalar.box), 1);
  EXPECT_EQ(runs(scalar, scalar), (Runs{{0, 0, 1}}));
}

TEST(Box, NothingIsCommonToEmptyTensors) {
  const Piece empty = all_of(whole_box({3, 0}));
  EXPECT_EQ(runs(empty, empty), Runs{});
}

TEST(Box, RowsAndColumnsMeet) {
  const Piece whole = all_of(whole_box({4, 6})), rows = all_of({{2, 0}, {4, 6}}), columns = all_of({{0, 3}, {4, 6}});
  EXPECT_EQ(runs(whole, rows), (Runs{{12, 0, 12}}));
  EXPECT_EQ(runs(whole, columns), (Runs{{3, 0, 3}, {9, 3, 3}, {15, 6, 3}, {21, 9, 3}}));
  EXPECT_EQ(runs(rows, columns), (Runs{{3, 6, 3}, {9, 9, 3}}));
  // A share that is cut in mid-row.
  EXPECT_EQ(runs({whole.box, 5, 6}, columns), (Runs{{0, 2, 1}, {4, 3, 2}}));
}

// Packed q, k and v, of which each of two ranks has half of the heads: boxes of a tensor with a dimension more.
TEST(Box, PackedHeadsMeet) {
  const Piece packed = all_of(whole_box({3, 4, 2})), first = all_of({{0, 0, 0}, {3, 2, 2}}),
              second = all_of({{0, 2, 0}, {3, 4, 2}});
  EXPECT_EQ(runs(packed, first), (Runs{{0, 0, 4}, {8, 4, 4}, {16, 8, 4}}));
  EXPECT_EQ(runs(packed, second), (Runs{{4, 0, 4}, {12, 4, 4}, {20, 8, 4}}));
  EXPECT_EQ(runs(first, second), Runs{});
}

// Law: element by element, random pieces of random tensors have in common what both hold.
TEST(Box, RandomPiecesShareWhatBothHold) {
  std::mt19937 random(11);
  const auto below = [&](std::int64_t bound) { return std::uniform_int_distribution<std::int64_t>(0, bound - 1)(random); };
  int met = 0;
  for (int turn = 0; turn < 3000; ++turn) {
    Shape shape;
    for (std::int64_t d = below(5); d > 0; --d) shape.push_back(1 + below(5));
    const auto piece = [&] {
      Piece of;
      for (const std::int64_t size : shape) {
        const std::int64_t a = below(size + 1), b = below(size + 1);
        of.box.begin.push_back(below(3) > 0 ? 0 : std::min(a, b));
        of.box.end.push_back(below(3) > 0 ? size : std::max(a, b));
      }
      const std::int64_t all = elements_of(of.box);
      of.first = below(all + 1) / 2;
      of.count = all - of.first - below(all - of.first + 1) / 2;
      return of;
    };
    // Where an element of the whole tensor lies in a piece.
    const auto places = [&](const Piece& of) {
      std::map<Shape, std::int64_t> at;
      Shape index = of.box.begin;
      for (std::int64_t i = 0; i < of.first + of.count; ++i) {
        if (i >= of.first) at[index] = i - of.first;
        for (std::size_t d = index.size(); d-- > 0;) {
          if (++index[d] < of.box.end[d]) break;
          index[d] = of.box.begin[d];
        }
      }
      return at;
    };
    const Piece one = piece(), other = piece();
    std::map<std::int64_t, std::int64_t> expected, found;
    const auto of_one = places(one), of_other = places(other);
    for (const auto& [index, at] : of_one)
      if (const auto there = of_other.find(index); there != of_other.end()) expected[at] = there->second;
    std::int64_t end_of_one = -1;
    for (const auto& run : runs(one, other)) {
      EXPECT_GE(run.in_one, end_of_one);
      end_of_one = run.in_one + run.count;
      for (std::int64_t i = 0; i < run.count; ++i) found[run.in_one + i] = run.in_other + i;
    }
    ASSERT_EQ(found, expected);
    met += !found.empty();
  }
  EXPECT_GT(met, 500);
}

}  // namespace
}  // namespace bonfire::box_test
