#pragma once

#include <cstdint>
#include <initializer_list>
#include <string_view>
#include <vector>

#include "bonfire/base/random.h"

namespace bonfire::cases {

// Choices, one after the other. Equal seeds give equal choices on every machine, which distributions of the standard library
// do not.
class Draw {
 public:
  explicit Draw(Random random) : random_(random) {}

  // A draw whose choices do not move when others are added to this one.
  [[nodiscard]] Draw fork(std::string_view name) const { return Draw(random_.fork(name)); }
  [[nodiscard]] Draw fork(int number) const { return Draw(random_.fork(static_cast<std::uint64_t>(number))); }

  int below(int bound) { return static_cast<int>(random_.below(next_++, static_cast<std::uint64_t>(bound))); }
  int between(int least, int most) { return least + below(most - least + 1); }
  bool chance(int percent) { return below(100) < percent; }
  template <class T>
  T pick(std::initializer_list<T> from) {
    return from.begin()[below(static_cast<int>(from.size()))];
  }
  std::vector<int> permutation(int count) {
    std::vector<int> list;
    for (int at = 0; at < count; ++at) list.insert(list.begin() + below(at + 1), at);
    return list;
  }

 private:
  Random random_;
  std::uint64_t next_ = 0;
};

}  // namespace bonfire::cases
