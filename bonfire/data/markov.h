#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "bonfire/base/random.h"
#include "bonfire/data/source.h"

namespace bonfire {

struct MarkovOptions {
  std::uint64_t seed = 0;
  std::int64_t vocab = 0;
  std::int64_t sequence = 0;
  std::int64_t branching = 8;  // tokens that can follow a token
  std::uint64_t size = unbounded;
};

// Synthetic language with a known floor: a random sparse Markov chain over the tokens. A sample starts in the stationary
// distribution, so the best loss that any model can reach, at every position, is the chain's entropy rate.
//
// Chain and samples are pure functions of the seed. The chain is irreducible because one random cycle goes through all
// tokens, and aperiodic because one token can follow itself.
class BONFIRE_API MarkovSource : public TokenSource {
 public:
  // Throws ConfigError where the options make no chain.
  explicit MarkovSource(const MarkovOptions& options);

  std::uint64_t size() const override { return options_.size; }
  std::int64_t vocab() const override { return options_.vocab; }
  std::int64_t sequence() const override { return options_.sequence; }
  void window(std::uint64_t index, std::span<std::int64_t> tokens) const override;

  // Nats per token.
  double entropy() const { return entropy_; }
  // Of `next` after `token`; 0 where it never follows.
  double probability(std::int64_t token, std::int64_t next) const;
  std::span<const double> stationary() const { return stationary_; }

 private:
  void draw_chain();
  void find_stationary();

  MarkovOptions options_;
  Random samples_;
  // Row `token` of each holds its `branching` successors, and the probability of a successor at or before each.
  std::vector<std::uint32_t> successors_;
  std::vector<double> cumulative_;
  std::vector<double> stationary_;
  std::vector<double> stationary_cumulative_;
  double entropy_ = 0;
};

}  // namespace bonfire
