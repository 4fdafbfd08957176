#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include <fmt/format.h>

#include "bonfire/base/api.h"

namespace bonfire {

enum class LogLevel { debug, info, warning, error };

// Where a rank's words go: a small value handle that is passed around, never a global. The default goes to stderr; a
// program that has a logger of its own gives a function instead.
class BONFIRE_API Log {
 public:
  using Sink = std::function<void(LogLevel, std::string_view)>;

  Log();  // stderr
  explicit Log(Sink sink, LogLevel least = LogLevel::info);
  static Log silent();

  template <class... Args>
  void debug(fmt::format_string<Args...> format, Args&&... args) const {
    write(LogLevel::debug, fmt::format(format, std::forward<Args>(args)...));
  }
  template <class... Args>
  void info(fmt::format_string<Args...> format, Args&&... args) const {
    write(LogLevel::info, fmt::format(format, std::forward<Args>(args)...));
  }
  template <class... Args>
  void warning(fmt::format_string<Args...> format, Args&&... args) const {
    write(LogLevel::warning, fmt::format(format, std::forward<Args>(args)...));
  }
  template <class... Args>
  void error(fmt::format_string<Args...> format, Args&&... args) const {
    write(LogLevel::error, fmt::format(format, std::forward<Args>(args)...));
  }

  void write(LogLevel level, std::string_view message) const;

 private:
  Sink sink_;
  LogLevel least_ = LogLevel::info;
};

}  // namespace bonfire
