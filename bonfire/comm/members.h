#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "bonfire/base/api.h"

namespace bonfire {

// The ranks of a group, in order, in as few words as their regularity allows: those along an axis of a mesh are one run,
// however many they are.
class BONFIRE_API Members {
 public:
  Members() = default;
  Members(const std::vector<int>& ranks);  // NOLINT(google-explicit-constructor): another form of the same

  std::vector<int> ranks() const;
  int size() const;

  // "0+1x1024": from 0 in steps of 1, 1024 of them. Runs are separated by commas.
  std::string text() const;
  // Nothing where the text is not one, or of more than 2^20 ranks.
  static std::optional<Members> parse(std::string_view text);

  auto operator<=>(const Members&) const = default;

 private:
  struct Run {
    int first = 0;
    int step = 1;
    int count = 0;
    auto operator<=>(const Run&) const = default;
  };
  std::vector<Run> runs_;
};

}  // namespace bonfire
