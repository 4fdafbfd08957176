#include "bonfire/plan/box.h"

#include <algorithm>

#include "bonfire/base/error.h"

namespace bonfire {
namespace {

// How the elements of a box lie, row by row.
Shape strides_of(const Box& box) {
  Shape strides(box.begin.size(), 1);
  for (std::size_t d = strides.size(); d-- > 1;) strides[d - 1] = strides[d] * (box.end[d] - box.begin[d]);
  return strides;
}

std::int64_t place_of(const Shape& index, const Box& box, const Shape& strides) {
  std::int64_t place = 0;
  for (std::size_t d = 0; d < index.size(); ++d) place += (index[d] - box.begin[d]) * strides[d];
  return place;
}

}  // namespace

Box whole_box(const Shape& shape) { return {Shape(shape.size(), 0), shape}; }

std::int64_t elements_of(const Box& box) {
  std::int64_t count = 1;
  for (std::size_t d = 0; d < box.begin.size(); ++d) count *= box.end[d] - box.begin[d];
  return count;
}

void for_each_common_run(const Piece& one, const Piece& other, const std::function<void(const CommonRun&)>& body) {
  const std::size_t dimensions = one.box.begin.size();
  require(other.box.begin.size() == dimensions, "pieces of tensors with {} and {} dimensions", dimensions,
          other.box.begin.size());
  Box common;
  for (std::size_t d = 0; d < dimensions; ++d) {
    common.begin.push_back(std::max(one.box.begin[d], other.box.begin[d]));
    common.end.push_back(std::min(one.box.end[d], other.box.end[d]));
    if (common.begin[d] >= common.end[d]) return;
  }
  // From `inner` on both boxes are no larger than what they share, but for `inner` itself: those dimensions lie in a row.
  std::size_t inner = dimensions;
  std::int64_t row = 1;
  while (inner > 0) {
    --inner;
    const std::int64_t shared = common.end[inner] - common.begin[inner];
    row *= shared;
    if (shared < one.box.end[inner] - one.box.begin[inner] || shared < other.box.end[inner] - other.box.begin[inner]) break;
  }

  CommonRun open;  // what was found last, until what follows it is known
  const auto add = [&](const CommonRun& run) {
    if (open.count > 0 && run.in_one == open.in_one + open.count && run.in_other == open.in_other + open.count) {
      open.count += run.count;
      return;
    }
    if (open.count > 0) body(open);
    open = run;
  };
  const Shape strides_of_one = strides_of(one.box), strides_of_other = strides_of(other.box);
  Shape index = common.begin;
  for (bool more = true; more;) {
    const std::int64_t in_one = place_of(index, one.box, strides_of_one) - one.first,
                       in_other = place_of(index, other.box, strides_of_other) - other.first;
    const std::int64_t skip = std::max<std::int64_t>({0, -in_one, -in_other}),
                       end = std::min({row, one.count - in_one, other.count - in_other});
    if (skip < end) add({in_one + skip, in_other + skip, end - skip});
    more = false;
    for (std::size_t d = inner; d-- > 0 && !more;) {
      more = ++index[d] < common.end[d];
      if (!more) index[d] = common.begin[d];
    }
  }
  if (open.count > 0) body(open);
}

}  // namespace bonfire
