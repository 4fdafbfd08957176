#pragma once

#include <array>
#include <cstdint>

#include "bonfire/base/api.h"

namespace bonfire {

// A permutation of {0, ..., size - 1} that is computed, not stored: a Feistel network over pairs (left, right) with
// columns * rows >= size, applied again while it lands outside.
class BONFIRE_API Permutation {
 public:
  // REQUIRES: size > 0.
  Permutation(std::uint64_t seed, std::uint64_t size);
  std::uint64_t operator()(std::uint64_t index) const;

 private:
  static constexpr std::size_t rounds = 8;
  std::uint64_t size_;
  std::uint64_t rows_;
  std::uint64_t columns_;
  std::array<std::uint64_t, rounds> keys_;
};

// The order in which a run sees the samples: position -> sample. Every epoch is its own permutation, and the epochs follow
// each other without a gap. It depends on the seed and the number of samples only. An unbounded source is read as it comes.
class BONFIRE_API SampleOrder {
 public:
  struct Options {
    std::uint64_t seed = 0;
    std::uint64_t samples = 0;
    bool shuffle = true;
  };

  explicit SampleOrder(const Options& options);
  std::uint64_t operator()(std::uint64_t position) const;

 private:
  Options options_;
};

}  // namespace bonfire
