#include "bonfire/data/markov.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <set>

#include "bonfire/base/error.h"

namespace bonfire::markov_test {
namespace {

std::vector<std::int64_t> window_of(const TokenSource& source, std::uint64_t index) {
  std::vector<std::int64_t> tokens(static_cast<std::size_t>(source.sequence()) + 1);
  source.window(index, tokens);
  return tokens;
}

TEST(Markov, RowsSumToOneAndHaveTheAskedSuccessors) {
  for (const std::int64_t branching : {2, 3, 17, 40}) {
    const MarkovSource source({.seed = 5, .vocab = 40, .sequence = 4, .branching = branching});
    for (std::int64_t token = 0; token < 40; ++token) {
      double sum = 0;
      int successors = 0;
      for (std::int64_t next = 0; next < 40; ++next) {
        const double probability = source.probability(token, next);
        sum += probability;
        successors += probability > 0;
      }
      EXPECT_NEAR(sum, 1, 1e-12);
      EXPECT_EQ(successors, branching);
    }
  }
}

TEST(Markov, StationaryDistributionStaysAndGivesTheEntropy) {
  for (const std::uint64_t seed : {1, 2, 3}) {
    const std::int64_t vocab = 97;
    const MarkovSource source({.seed = seed, .vocab = vocab, .sequence = 4, .branching = 2});
    const auto pi = source.stationary();
    EXPECT_NEAR(std::accumulate(pi.begin(), pi.end(), 0.0), 1, 1e-12);
    double entropy = 0;
    for (std::int64_t next = 0; next < vocab; ++next) {
      double inflow = 0;
      for (std::int64_t token = 0; token < vocab; ++token) {
        const double probability = source.probability(token, next);
        inflow += pi[token] * probability;
        if (probability > 0) entropy -= pi[token] * probability * std::log(probability);
      }
      EXPECT_NEAR(inflow, pi[next], 1e-13);
      EXPECT_GT(pi[next], 0);
    }
    EXPECT_NEAR(source.entropy(), entropy, 1e-12);
    EXPECT_LT(source.entropy(), std::log(2.0));
  }
}

// A model that knows the chain reaches the entropy, at the first position as at the last.
TEST(Markov, TheTrueModelsLossIsTheEntropyAtEveryPosition) {
  const MarkovSource source({.seed = 11, .vocab = 64, .sequence = 32, .branching = 5});
  const int samples = 4000;
  std::vector<double> sums(32), squares(32);
  for (int sample = 0; sample < samples; ++sample) {
    const auto tokens = window_of(source, sample);
    for (int at = 0; at < 32; ++at) {
      const double loss = -std::log(source.probability(tokens[at], tokens[at + 1]));
      ASSERT_TRUE(std::isfinite(loss));
      sums[at] += loss;
      squares[at] += loss * loss;
    }
  }
  for (int at = 0; at < 32; ++at) {
    const double mean = sums[at] / samples;
    const double error = std::sqrt((squares[at] / samples - mean * mean) / samples);
    EXPECT_NEAR(mean, source.entropy(), 5 * error) << "position " << at;
  }
}

TEST(Markov, StartsInTheStationaryDistribution) {
  const MarkovSource source({.seed = 3, .vocab = 10, .sequence = 1, .branching = 3});
  std::vector<double> seen(10);
  const int samples = 40000;
  for (int sample = 0; sample < samples; ++sample) seen[window_of(source, sample)[0]] += 1.0 / samples;
  for (int token = 0; token < 10; ++token) {
    const double expected = source.stationary()[token];
    EXPECT_NEAR(seen[token], expected, 5 * std::sqrt(expected * (1 - expected) / samples));
  }
}

TEST(Markov, ASampleDependsOnSeedAndIndexOnly) {
  const MarkovOptions options{.seed = 3, .vocab = 1000, .sequence = 16, .branching = 4};
  const MarkovSource a(options), b(options);
  window_of(a, 5);
  EXPECT_EQ(window_of(a, 7), window_of(b, 7));
  EXPECT_NE(window_of(a, 7), window_of(a, 8));
  auto other = options;
  other.seed = 4;
  EXPECT_NE(window_of(a, 7), window_of(MarkovSource(other), 7));
}

TEST(Markov, HeldOutSamplesAreOthersOfTheSameChain) {
  const auto source =
      std::make_shared<MarkovSource>(MarkovOptions{.seed = 3, .vocab = 1000, .sequence = 16, .branching = 4});
  const auto parts = split(source, 0.1);
  std::set<std::vector<std::int64_t>> seen;
  std::vector<std::int64_t> input(16), target(16);
  for (std::uint64_t index = 0; index < 200; ++index) {
    for (const auto& part : {parts.train, parts.held_out}) {
      part->read(index, input.data(), target.data());
      EXPECT_TRUE(seen.insert(input).second);
      for (int at = 0; at < 16; ++at) {
        EXPECT_GT(source->probability(input[at], target[at]), 0);
        if (at) {
          EXPECT_EQ(input[at], target[at - 1]);
        }
      }
    }
  }
}

TEST(Markov, RefusesWhatMakesNoChain) {
  EXPECT_THROW(MarkovSource({.vocab = 1, .sequence = 4}), ConfigError);
  EXPECT_THROW(MarkovSource({.vocab = 8, .sequence = 0}), ConfigError);
  EXPECT_THROW(MarkovSource({.vocab = 8, .sequence = 4, .branching = 1}), ConfigError);
  EXPECT_THROW(MarkovSource({.vocab = 8, .sequence = 4, .branching = 9}), ConfigError);
}

}  // namespace
}  // namespace bonfire::markov_test
