#pragma once

#include <string>

#include "bonfire/base/api.h"

namespace bonfire {

// Lets this process, and what it starts, open as many files as the system allows without asking: the hard limit. False
// where it may already, or where the system refuses.
BONFIRE_API bool raise_open_files();

// Raises the limit too. Throws ConfigError that names `what` and both numbers where more than the hard limit are needed.
BONFIRE_API void require_open_files(long needed, const std::string& what);

// How many this process has open; 0 where the system does not tell.
BONFIRE_API long open_files();

// What the process that hosts the store needs for it: a rank has a second connection while two of its threads speak to it.
constexpr long store_files(long ranks) { return 2 * ranks; }
// What anything else in a process needs: libraries, devices, logs.
constexpr long other_files = 64;

}  // namespace bonfire
