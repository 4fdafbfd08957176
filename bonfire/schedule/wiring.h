#pragma once

#include <vector>

#include "bonfire/schedule/clock.h"
#include "bonfire/schedule/schedule.h"
#include "bonfire/schedule/timeline.h"

namespace bonfire::schedule {

// A table as tasks of a clock, under the rules that hold on real machines:
//   - a rank goes through its row in order; messages and collectives are only issued there;
//   - a message starts when both its send and its receive have been issued, a collective when all ranks that take part have
//     issued it;
//   - what was issued to one communicator runs in that order. Each direction of each pair of ranks is a communicator of its
//   own,
//     and so are the data-parallel ranks of a rank, the ranks that share a stage, and each group of tied weights;
//   - a computation waits for the messages and collectives whose results it reads.
// Where the table has no messages they are implied: sent when made, received when needed.
struct Wiring {
  Clock clock;
  std::vector<Resource> ranks;
  std::vector<std::uint32_t> first;  // the task of a rank's first cell; its other cells follow
  std::vector<Task> message_tasks;   // each with its entry in `messages`
  std::vector<Delivery> messages;
  std::vector<std::uint32_t> origin;  // per task past the cells: the task of the cell that issued it first

  Task task(Position cell) const {
    return {first[static_cast<std::size_t>(cell.rank)] + static_cast<std::uint32_t>(cell.at)};
  }
  // Of a message or a collective: a cell that issued it.
  Position cell(Task task) const;
};

// REQUIRES: messages match (the validator has checked that) where there are any.
Wiring wire(const Schedule& schedule, const Index& index, const Costs& costs);

}  // namespace bonfire::schedule
