#pragma once

#include <cstddef>
#include <vector>

#include "bonfire/base/api.h"
#include "bonfire/schedule/action.h"

namespace bonfire::schedule {

// Where in a table a cell is. No such cell: rank -1.
struct Position {
  std::int32_t rank = -1;
  std::int32_t at = -1;  // its number in the rank's row

  explicit operator bool() const { return rank >= 0; }
  bool operator==(const Position&) const = default;
};

// Who does what in which order in one step: a row of actions for each pipeline rank. Stages are numbered through the model;
// which rank holds which stage is what the rows say.
struct Schedule {
  int stages = 0;
  int microbatches = 0;
  std::vector<std::vector<Action>> rows;

  int ranks() const { return static_cast<int>(rows.size()); }
  const Action& at(Position cell) const {
    return rows[static_cast<std::size_t>(cell.rank)][static_cast<std::size_t>(cell.at)];
  }
  bool operator==(const Schedule&) const = default;
};

// What kinds of cells a table has. A table without messages, without sharding or without updates leaves them to lowering;
// one that has some of a sort must have all of it.
struct Contents {
  bool backward = false;
  bool messages = false;
  bool sharding = false;  // unshard or reshard
  bool reductions = false;
  bool updates = false;
  bool ties = false;
};
BONFIRE_API Contents contents(const Schedule& schedule);

// Finds the cell of an action that has a microbatch. REQUIRES: stages and microbatches of all actions are in range.
class BONFIRE_API Index {
 public:
  explicit Index(const Schedule& schedule);

  // The first in the table; none: Position().
  Position find(Kind kind, int stage, int microbatch) const { return cells_[slot(kind, stage, microbatch)]; }
  // The cell that computes the gradient that `stage` hands to the stage before it.
  Position input_gradient(int stage, int microbatch) const {
    const Position whole = find(Kind::backward, stage, microbatch);
    return whole ? whole : find(Kind::input_gradient, stage, microbatch);
  }
  // The rank at the other end of a message, for either of its cells. REQUIRES: the table is valid.
  int peer(const Action& message) const;
  // Cells whose action another cell has already, in the order of the table.
  const std::vector<Position>& repeated() const { return repeated_; }

 private:
  std::size_t slot(Kind kind, int stage, int microbatch) const {
    return (static_cast<std::size_t>(kind) * static_cast<std::size_t>(stages_) + static_cast<std::size_t>(stage)) *
               static_cast<std::size_t>(microbatches_) +
           static_cast<std::size_t>(microbatch);
  }
  int stages_;
  int microbatches_;
  std::vector<Position> cells_;
  std::vector<Position> repeated_;
};

// The most activations that are live at once on each rank: an activation lives from the forward that makes it to the end of
// the backward, or of the weight gradient, that lets go of it. Those without a backward do not count.
BONFIRE_API std::vector<int> peak_activations(const Schedule& schedule);

}  // namespace bonfire::schedule
