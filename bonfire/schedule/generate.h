#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "bonfire/base/api.h"
#include "bonfire/schedule/schedule.h"

namespace bonfire::schedule {

struct Shape {
  int ranks = 1;         // of the pipeline
  int microbatches = 1;  // in one step
  int chunks = 1;        // stages per rank
};

// Each returns the computation and the updates of one step; lowering.h adds the rest. Throws ConfigError, saying what is
// allowed, where the schedule does not exist for the shape. docs/schedules.md shows them all.
BONFIRE_API Schedule naive(Shape shape);        // one microbatch, one stage at a time: plain model parallelism
BONFIRE_API Schedule gpipe(Shape shape);        // all forwards, then all backwards
BONFIRE_API Schedule one_f_one_b(Shape shape);  // as many forwards ahead as there are stages to come
BONFIRE_API Schedule interleaved(Shape shape);  // 1F1B over several chunks: stage s on rank s mod ranks
BONFIRE_API Schedule zb_h1(Shape shape);        // weight gradients fill the bubble; memory of 1F1B
BONFIRE_API Schedule zb_h2(Shape shape);        // more forwards ahead: no bubble inside a rank's step, twice the memory
BONFIRE_API Schedule zb_v(Shape shape);         // two chunks, down the ranks and up again; memory of 1F1B

// By the name that the configuration and the command use.
BONFIRE_API Schedule generate(std::string_view name, Shape shape);
BONFIRE_API const std::vector<std::string>& schedule_names();
// The number of chunks where nobody says one: 2 for schedules that are about chunks, else 1.
BONFIRE_API int natural_chunks(std::string_view name);

}  // namespace bonfire::schedule
