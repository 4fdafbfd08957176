#pragma once

#include <functional>

#include "bonfire/base/clock.h"
#include "bonfire/schedule/action.h"

namespace bonfire {

// A cell of a table that was executed, and when the host was in it.
struct ExecutedCell {
  schedule::Action action;
  Nanoseconds start = 0;
  Nanoseconds end = 0;
};

// Hears of every cell when the rank comes to it, and when it goes on to the next.
using CellObserver = std::function<void(const schedule::Action& action, bool begins)>;

}  // namespace bonfire
