#pragma once

#include <cerrno>
#include <cstring>
#include <utility>

#include "bonfire/base/error.h"

namespace bonfire {

// Whether a system call did what it was asked, and if not, why. Made from the call's result where that is an argument, it
// takes errno after the call and before anything else: arguments of a function are evaluated in no particular order, but
// never interleaved.
struct SystemResult {
  SystemResult(bool a_succeeded) : succeeded(a_succeeded), reason(errno) {}  // NOLINT: meant to be implicit
  bool succeeded;
  int reason;
};

// Throws Error with the message and the system's reason unless the call succeeded:
//   require_system(pipe2(ends, O_CLOEXEC) == 0, "cannot make a pipe");
template <class... Args>
void require_system(SystemResult result, fmt::format_string<Args...> format, Args&&... args) {
  if (!result.succeeded) [[unlikely]]
    throw_error(fmt::format("{}: {}", fmt::format(format, std::forward<Args>(args)...), std::strerror(result.reason)));
}

}  // namespace bonfire
