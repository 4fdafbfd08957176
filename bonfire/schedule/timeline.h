#pragma once

#include <functional>
#include <vector>

#include "bonfire/base/api.h"
#include "bonfire/schedule/schedule.h"

namespace bonfire::schedule {

// From one rank to another; `action` is the send, also where the table leaves sends out.
struct Delivery {
  std::int32_t from = 0;
  std::int32_t to = 0;
  Action action;
};

// Seconds of each kind, the same for all stages and microbatches.
struct StageCosts {
  double forward = 1;
  double backward = 2;
  double input_gradient = 1;
  double weight_gradient = 1;
  double update = 0;
  double unshard = 0;
  double reduce = 0;
  double tie = 0;
};

// Seconds of any action and any message.
struct Costs {
  Costs() : Costs(StageCosts{}) {}
  BONFIRE_API Costs(const StageCosts& stage, double message_seconds = 0);  // NOLINT: the same for all is a way to say it

  std::function<double(const Action&)> action;     // computations and collectives; of other kinds it is not asked
  std::function<double(const Delivery&)> message;  // the time on the wire
};

struct Span {
  double start = 0;
  double end = 0;
};

// One step of a schedule in time.
struct Timeline {
  double makespan = 0;
  double bubble = 0;                     // idle fraction of all ranks' time, from the first start to the last end
  std::vector<double> busy;              // per rank: seconds of computation
  std::vector<int> peak_activations;     // per rank
  std::vector<std::vector<Span>> cells;  // per rank, as in its row
  std::vector<Delivery> messages;
  std::vector<Span> message_spans;  // of each message

  // From the start of the rank's first cell that takes time to the end of its last: what a step costs where the next one may
  // begin on this rank before others have ended.
  BONFIRE_API double occupied(int rank) const;
};

// REQUIRES: the schedule is valid (validate.h).
BONFIRE_API Timeline simulate(const Schedule& schedule, const Costs& costs = {});

}  // namespace bonfire::schedule
