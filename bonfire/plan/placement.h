#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "bonfire/base/api.h"
#include "bonfire/plan/box.h"

namespace bonfire::plan {

// What a parameter of a module is in the whole model, of which the module may be a part: a stage of a pipeline, or one of
// several ranks that split a weight. What is not said is the module's own: the name there, the shape, all of it.
struct Placement {
  std::string name{};  // its path in the whole model
  Shape shape{};       // of the whole tensor
  // The parts of it that this is: one, or several on top of each other along the first dimension, as a rank has them that
  // splits a packed weight.
  std::vector<Box> boxes{};
  std::string tie{};  // of a weight that several stages hold and keep equal: one word, the same on all of them
  // Several parts of the model may hold the same elements, beside data parallelism: stages that hold a tied weight, ranks
  // that each have all of a weight while they split others. The number of this one among them; what counts once, such as a
  // norm, counts in number 0.
  int copy = 0;

  bool split() const { return boxes.size() > 1 || (boxes.size() == 1 && boxes.front() != whole_box(shape)); }
  bool operator==(const Placement&) const = default;
};

// Some of the elements of a parameter that lie in one of its boxes.
struct PlacedPiece {
  Piece piece;
  std::int64_t at = 0;  // of the first of them, counted from where the count of all began
};
// Elements [first, first + count) of a parameter, box by box.
BONFIRE_API std::vector<PlacedPiece> pieces_of(const Placement& placement, std::int64_t first, std::int64_t count);

}  // namespace bonfire::plan
