#pragma once

#include <functional>

#include "bonfire/base/clock.h"
#include "bonfire/schedule/action.h"

namespace bonfire {

// A cell of a table that was executed, and when the host was in it. A computation begins when what it reads has come.
struct ExecutedCell {
  schedule::Action action;
  Nanoseconds start = 0;
  Nanoseconds end = 0;
};

// Hears of every cell when it begins, and when the rank goes on to the next.
using CellObserver = std::function<void(const schedule::Action& action, bool begins)>;

}  // namespace bonfire
