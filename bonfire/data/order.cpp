#include "bonfire/data/order.h"

#include <cmath>

#include "bonfire/base/error.h"
#include "bonfire/base/random.h"

namespace bonfire {
namespace {

// More samples than this have no end that a run could reach: the halves of an unbounded source are such.
constexpr std::uint64_t most = std::uint64_t{1} << 62;

std::uint64_t scramble(std::uint64_t x) {
  x = (x ^ (x >> 33)) * 0xff51afd7ed558ccdULL;
  x = (x ^ (x >> 33)) * 0xc4ceb9fe1a85ec53ULL;
  return x ^ (x >> 33);
}

}  // namespace

Permutation::Permutation(std::uint64_t seed, std::uint64_t size) : size_(size) {
  require(size > 0 && size <= most, "a permutation of {} samples: must be 1 to 2^62", size);
  rows_ = static_cast<std::uint64_t>(std::sqrt(static_cast<double>(size))) + 1;
  columns_ = (size + rows_ - 1) / rows_;
  for (std::size_t round = 0; round < rounds; ++round) keys_[round] = Random(seed).fork(round).key();
}

std::uint64_t Permutation::operator()(std::uint64_t index) const {
  do {
    auto row = index / columns_, column = index % columns_;
    for (std::size_t round = 0; round < rounds; round += 2) {
      row = (row + scramble(column ^ keys_[round]) % rows_) % rows_;
      column = (column + scramble(row ^ keys_[round + 1]) % columns_) % columns_;
    }
    index = row * columns_ + column;
  } while (index >= size_);
  return index;
}

SampleOrder::SampleOrder(const Options& options) : options_(options) {
  if (options.samples == 0) fail_config("the data holds no sample");
}

std::uint64_t SampleOrder::operator()(std::uint64_t position) const {
  if (options_.samples > most) return position;
  const auto epoch = position / options_.samples, index = position % options_.samples;
  if (!options_.shuffle) return index;
  return Permutation(Random(options_.seed).fork("order").fork(epoch).key(), options_.samples)(index);
}

}  // namespace bonfire
