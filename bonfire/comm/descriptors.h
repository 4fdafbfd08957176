#pragma once

#include "bonfire/base/api.h"

namespace bonfire {

// Opens /dev/null in the place of stdin, stdout and stderr where they are closed, so that no file or socket takes their
// number, and with it what is printed. The first line of a main.
BONFIRE_API void keep_standard_streams();

}  // namespace bonfire
