#include "bonfire/base/log.h"

#include <unistd.h>

#include <cstdio>
#include <ctime>

namespace bonfire {
namespace {

struct Look {
  const char* word;
  const char* colour;
};

Look look_of(LogLevel level) {
  switch (level) {
    case LogLevel::debug: return {"debug", "\033[2m"};
    case LogLevel::info: return {"info", "\033[32m"};
    case LogLevel::warning: return {"warning", "\033[33m"};
    case LogLevel::error: return {"error", "\033[31m"};
  }
  return {"?", ""};
}

void write_to_stderr(LogLevel level, std::string_view message) {
  const std::time_t now = std::time(nullptr);
  std::tm time{};
  localtime_r(&now, &time);
  const auto [word, colour] = look_of(level);
  const bool coloured = isatty(STDERR_FILENO) != 0;
  // One write, so that lines of ranks that share a terminal do not mix.
  const std::string line =
      fmt::format("{:04}-{:02}-{:02} {:02}:{:02}:{:02} {}{}{} {}\n", time.tm_year + 1900, time.tm_mon + 1, time.tm_mday,
                  time.tm_hour, time.tm_min, time.tm_sec, coloured ? colour : "", word, coloured ? "\033[0m" : "", message);
  std::fwrite(line.data(), 1, line.size(), stderr);
}

}  // namespace

Log::Log() : sink_(write_to_stderr) {}

Log::Log(Sink sink, LogLevel least) : sink_(std::move(sink)), least_(least) {}

Log Log::silent() {
  return Log([](LogLevel, std::string_view) {}, LogLevel::error);
}

void Log::write(LogLevel level, std::string_view message) const {
  if (level >= least_) sink_(level, message);
}

}  // namespace bonfire
