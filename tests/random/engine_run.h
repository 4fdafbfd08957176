#pragma once

#include <string>

#include "tests/random/engine_case.h"

namespace bonfire::cases {

// Trains on ranks that are threads, and compares with the oracle. Returns what is wrong, or nothing.
std::string run_engine_case(const EngineCase& each);

}  // namespace bonfire::cases
