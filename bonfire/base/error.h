#pragma once

#include <stdexcept>
#include <string>
#include <utility>

#include <fmt/format.h>

#include "bonfire/base/api.h"

namespace bonfire {

// What a run throws when it cannot go on. The message is one line that names the thing, its value and what is allowed.
class BONFIRE_API Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The user asked for something that cannot be: bad arguments or configuration, found before anything starts.
// The command turns it into exit code 2.
class BONFIRE_API ConfigError : public Error {
 public:
  using Error::Error;
};

[[noreturn]] BONFIRE_API void throw_error(std::string message);
[[noreturn]] BONFIRE_API void throw_config_error(std::string message);

template <class... Args>
[[noreturn]] void fail(fmt::format_string<Args...> format, Args&&... args) {
  throw_error(fmt::format(format, std::forward<Args>(args)...));
}

template <class... Args>
[[noreturn]] void fail_config(fmt::format_string<Args...> format, Args&&... args) {
  throw_config_error(fmt::format(format, std::forward<Args>(args)...));
}

// Throws Error with the given message unless `condition` holds. The arguments are formatted only then.
template <class... Args>
void require(bool condition, fmt::format_string<Args...> format, Args&&... args) {
  if (!condition) [[unlikely]]
    throw_error(fmt::format(format, std::forward<Args>(args)...));
}

}  // namespace bonfire
