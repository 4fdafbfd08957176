#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include "bonfire/base/api.h"

namespace bonfire {

// A counter-based generator (Philox 4x32, ten rounds): the value at (key, index) is a pure function of the two, so it does
// not depend on how many values were drawn before, in which order, or by which rank.
class BONFIRE_API Random {
 public:
  explicit Random(std::uint64_t seed) : key_(seed) {}

  // A generator whose values have nothing to do with this one's: for a named parameter, a step, a region.
  [[nodiscard]] Random fork(std::uint64_t number) const;
  [[nodiscard]] Random fork(std::string_view name) const;

  std::uint64_t key() const { return key_; }

  // Four 32-bit words for counter `block`.
  std::array<std::uint32_t, 4> block(std::uint64_t block) const;

  std::uint64_t bits(std::uint64_t index) const;
  // Uniform in [0, 1).
  double uniform(std::uint64_t index) const;
  // Uniform in {0, ..., bound - 1}. REQUIRES: bound > 0.
  std::uint64_t below(std::uint64_t index, std::uint64_t bound) const;
  // Standard normal.
  double normal(std::uint64_t index) const;

 private:
  std::uint64_t key_;
};

}  // namespace bonfire
