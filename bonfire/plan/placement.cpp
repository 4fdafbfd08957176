#include "bonfire/plan/placement.h"

#include <algorithm>

namespace bonfire::plan {

std::vector<PlacedPiece> pieces_of(const Placement& placement, std::int64_t first, std::int64_t count) {
  std::vector<PlacedPiece> pieces;
  std::int64_t before = 0;  // elements of the boxes on top of this one
  for (const auto& box : placement.boxes) {
    const std::int64_t elements = elements_of(box);
    const std::int64_t begin = std::max(first, before), end = std::min(first + count, before + elements);
    if (begin < end) pieces.push_back({{box, begin - before, end - begin}, begin - first});
    before += elements;
  }
  return pieces;
}

}  // namespace bonfire::plan
