#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "bonfire/base/api.h"

// Parts of tensors, however they are divided: what a rank holds, what a file has, and what the two have in common.
namespace bonfire {

using Shape = std::vector<std::int64_t>;

// In each dimension d the indices [begin[d], end[d]). Of a scalar, which has no dimensions: the one element.
struct Box {
  Shape begin, end;
  bool operator==(const Box&) const = default;
};

// All of a tensor.
BONFIRE_API Box whole_box(const Shape& shape);
BONFIRE_API std::int64_t elements_of(const Box& box);

// Consecutive elements of a box, counted row by row: [first, first + count).
struct Piece {
  Box box;
  std::int64_t first = 0, count = 0;
  bool operator==(const Piece&) const = default;
};

// Elements that lie behind one another in both of two pieces, counted from the beginning of each.
struct CommonRun {
  std::int64_t in_one = 0, in_other = 0, count = 0;
  bool operator==(const CommonRun&) const = default;
};

// Calls `body` with all elements that two pieces of one tensor have in common, in rising order, in as few runs as there are.
BONFIRE_API void for_each_common_run(const Piece& one, const Piece& other,
                                     const std::function<void(const CommonRun&)>& body);

}  // namespace bonfire
