#pragma once

#include <cstdlib>

// What must hold of whatever was read; a fuzzer sees an abort, and says with which input.
#define REQUIRE(condition)          \
  do {                              \
    if (!(condition)) std::abort(); \
  } while (false)
