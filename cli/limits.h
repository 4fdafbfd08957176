#pragma once

#include <charconv>
#include <string>

#include <fmt/format.h>
#include <CLI/Validators.hpp>

namespace bonfire::cli {

// Checks of an option's number, whose message is one line that says what is allowed.
inline CLI::Validator number_check(const std::string& allowed, bool (*holds)(double value, double limit), double limit) {
  return {[=](const std::string& text) {
            double value = 0;
            const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
            const bool number = error == std::errc() && end == text.data() + text.size();
            return number && holds(value, limit) ? std::string() : fmt::format("{}; allowed: {}", text, allowed);
          },
          ""};
}

inline CLI::Validator at_least(int limit) {
  return number_check(
      fmt::format("a number, at least {}", limit), [](double value, double least) { return value >= least; }, limit);
}
inline CLI::Validator more_than(int limit) {
  return number_check(
      fmt::format("a number, more than {}", limit), [](double value, double least) { return value > least; }, limit);
}

}  // namespace bonfire::cli
