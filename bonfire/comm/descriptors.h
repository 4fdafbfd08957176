#pragma once

#include <string>

#include "bonfire/base/api.h"

namespace bonfire {

// Opens /dev/null in the place of stdin, stdout and stderr where they are closed, so that no file or socket takes their
// number, and with it what is printed. The first line of a main.
BONFIRE_API void keep_standard_streams();

// Lets this process, and what it starts, open as many files as the system allows without asking: the hard limit. Throws
// ConfigError that names `what` and both numbers where it needs more.
BONFIRE_API void require_open_files(long needed, const std::string& what);

}  // namespace bonfire
