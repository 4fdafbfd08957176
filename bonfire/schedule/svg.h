#pragma once

#include <string>

#include "bonfire/base/api.h"
#include "bonfire/schedule/schedule.h"
#include "bonfire/schedule/timeline.h"

namespace bonfire::schedule {

struct SvgOptions {
  std::string title;
};

// A picture of a step: one row a rank, one box a computation with the number of its microbatch, the bubble hatched. Later
// chunks of a rank are lighter. REQUIRES: `timeline` is of `schedule`.
BONFIRE_API std::string svg_picture(const Schedule& schedule, const Timeline& timeline, const SvgOptions& options = {});

}  // namespace bonfire::schedule
