#pragma once

#include <string>

#include "tests/random/engine_case.h"

namespace bonfire::cases {

// Trains on ranks that are threads, and compares with the oracle. Returns what is wrong, or nothing.
std::string run_engine_case(const EngineCase& each);

// Of the events of a case: how many there are, and how many of them cannot be compared, because any rounding grows there
// beyond all bounds.
struct Compared {
  int events = 0, left_out = 0;
};
Compared compared_events(const EngineCase& each);

}  // namespace bonfire::cases
