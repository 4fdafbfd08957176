#pragma once

namespace bonfire::cases {

// What the documentation says of a case.
enum class Verdict {
  works,
  refused,  // before anything runs
  either,   // it may be refused at any place, but must not be wrong
};

// The beginning of a result of what is not a case at all: the oracle throws.
inline constexpr const char* no_case = "no case:";

}  // namespace bonfire::cases
