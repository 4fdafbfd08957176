#include "bonfire/data/order.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

namespace bonfire::order_test {
namespace {

std::vector<std::uint64_t> all_of(const Permutation& permutation, std::uint64_t size) {
  std::vector<std::uint64_t> images(size);
  for (std::uint64_t at = 0; at < size; ++at) images[at] = permutation(at);
  return images;
}

TEST(Permutation, HitsEverythingOnce) {
  for (std::uint64_t size = 1; size <= 300; ++size) {
    auto images = all_of(Permutation(size, size), size);
    std::sort(images.begin(), images.end());
    for (std::uint64_t at = 0; at < size; ++at) ASSERT_EQ(images[at], at) << "of " << size;
  }
}

TEST(Permutation, StaysInsideAVeryLargeRange) {
  const std::uint64_t size = (std::uint64_t{1} << 62) - 12345;
  const Permutation permutation(1, size);
  std::vector<std::uint64_t> images;
  for (std::uint64_t at = 0; at < 10000; ++at) images.push_back(permutation(size - 1 - at * 999'999'937));
  EXPECT_LT(*std::max_element(images.begin(), images.end()), size);
  std::sort(images.begin(), images.end());
  EXPECT_EQ(std::adjacent_find(images.begin(), images.end()), images.end());
}

// Over many seeds each element is as likely at each place as at any other.
TEST(Permutation, PlacesAreEvenlyLikely) {
  for (const std::uint64_t size : {2, 3, 7, 10, 16, 30}) {
    const int seeds = 4000;
    std::vector<std::vector<int>> counts(size, std::vector<int>(size));
    for (int seed = 0; seed < seeds; ++seed) {
      const auto images = all_of(Permutation(seed, size), size);
      for (std::uint64_t at = 0; at < size; ++at) ++counts[at][images[at]];
    }
    const double expected = static_cast<double>(seeds) / static_cast<double>(size);
    double chi = 0;
    for (const auto& row : counts)
      for (const int count : row) chi += (count - expected) * (count - expected) / expected;
    const double freedom = static_cast<double>((size - 1) * (size - 1));
    EXPECT_LT(chi, freedom + 5 * std::sqrt(2 * freedom) + 10) << "of " << size;
  }
}

// Neighbours in the order are no neighbours in the data.
TEST(Permutation, DoesNotKeepNeighbours) {
  const std::uint64_t size = 100000;
  const auto images = all_of(Permutation(9, size), size);
  int near = 0;
  for (std::uint64_t at = 1; at < size; ++at) near += images[at] - images[at - 1] + 10 <= 20;
  EXPECT_NEAR(near, 20, 25);
}

TEST(SampleOrder, EveryEpochIsAnotherPermutation) {
  const std::uint64_t samples = 53;
  const SampleOrder order({.seed = 4, .samples = samples});
  std::vector<std::vector<std::uint64_t>> epochs(3);
  for (std::uint64_t at = 0; at < 3 * samples; ++at) epochs[at / samples].push_back(order(at));
  EXPECT_NE(epochs[0], epochs[1]);
  EXPECT_NE(epochs[1], epochs[2]);
  for (auto& epoch : epochs) {
    std::sort(epoch.begin(), epoch.end());
    for (std::uint64_t at = 0; at < samples; ++at) EXPECT_EQ(epoch[at], at);
  }
  const SampleOrder plain({.seed = 4, .samples = samples, .shuffle = false});
  for (std::uint64_t at = 0; at < 3 * samples; ++at) EXPECT_EQ(plain(at), at % samples);
}

}  // namespace
}  // namespace bonfire::order_test
