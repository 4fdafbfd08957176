#pragma once

#include "bonfire/base/clock.h"
#include "bonfire/schedule/action.h"

namespace bonfire {

// A cell of a table that was executed, and when the host was in it.
struct ExecutedCell {
  schedule::Action action;
  Nanoseconds start = 0;
  Nanoseconds end = 0;
};

}  // namespace bonfire
