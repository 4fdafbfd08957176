#include "bonfire/data/markov.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "bonfire/base/error.h"

namespace bonfire {
namespace {

// No transition is rarer than this part of an even share, so that the chain mixes fast and the entropy is not dominated by
// transitions that a short run never sees.
constexpr double least_weight = 0.05;

std::vector<std::uint32_t> random_permutation(const Random& random, std::size_t size) {
  std::vector<std::uint32_t> order(size);
  std::iota(order.begin(), order.end(), 0U);
  for (std::size_t at = size - 1; at > 0; --at) std::swap(order[at], order[random.below(at, at + 1)]);
  return order;
}

// Adds `count` different tokens out of `vocab`, none of those already in `row`, each set as likely as any other (Floyd).
void draw_others(const Random& random, std::uint32_t vocab, std::vector<std::uint32_t>& row, std::size_t count) {
  auto fixed = row;
  std::sort(fixed.begin(), fixed.end());
  std::vector<std::uint32_t> drawn;  // sorted, numbered among the tokens that are not fixed
  const auto free = static_cast<std::uint32_t>(vocab - fixed.size());
  for (auto last = static_cast<std::uint32_t>(free - count); last < free; ++last) {
    auto token = static_cast<std::uint32_t>(random.below(last, std::uint64_t{last} + 1));
    auto at = std::lower_bound(drawn.begin(), drawn.end(), token);
    if (at != drawn.end() && *at == token) token = last, at = drawn.end();
    drawn.insert(at, token);
  }
  for (auto token : drawn) {
    for (const auto taken : fixed) token += token >= taken;
    row.push_back(token);
  }
}

}  // namespace

MarkovSource::MarkovSource(const MarkovOptions& options)
    : options_(options), samples_(Random(options.seed).fork("samples")) {
  constexpr std::int64_t most = std::int64_t{1} << 26;
  if (options.vocab < 2 || options.vocab > most) fail_config("vocab is {}, must be 2 to {}", options.vocab, most);
  if (options.sequence < 1) fail_config("sequence is {}, must be at least 1", options.sequence);
  if (options.branching < 2 || options.branching > std::min(options.vocab, most / options.vocab))
    fail_config("branching is {}, must be 2 to {} for a vocabulary of {}", options.branching,
                std::min(options.vocab, most / options.vocab), options.vocab);
  draw_chain();
  find_stationary();
}

void MarkovSource::draw_chain() {
  const auto vocab = static_cast<std::uint32_t>(options_.vocab);
  const auto branching = static_cast<std::size_t>(options_.branching);
  const Random chain = Random(options_.seed).fork("chain");
  const auto cycle = random_permutation(chain.fork("cycle"), vocab);
  std::vector<std::uint32_t> after(vocab);
  for (std::size_t at = 0; at < vocab; ++at) after[cycle[at]] = cycle[(at + 1) % vocab];

  successors_.reserve(vocab * branching);
  cumulative_.reserve(vocab * branching);
  for (std::uint32_t token = 0; token < vocab; ++token) {
    std::vector<std::uint32_t> row{after[token]};
    if (token == cycle[0]) row.push_back(token);
    draw_others(chain.fork("successors").fork(token), vocab, row, branching - row.size());
    successors_.insert(successors_.end(), row.begin(), row.end());

    const Random draw = chain.fork("weights").fork(token);
    std::vector<double> weights(branching);
    for (std::size_t at = 0; at < branching; ++at) weights[at] = least_weight - std::log1p(-draw.uniform(at));
    const double total = std::accumulate(weights.begin(), weights.end(), 0.0);
    double sum = 0;
    for (std::size_t at = 0; at + 1 < branching; ++at) cumulative_.push_back(sum += weights[at] / total);
    cumulative_.push_back(1);
  }
}

void MarkovSource::find_stationary() {
  const auto vocab = static_cast<std::size_t>(options_.vocab);
  const auto branching = static_cast<std::size_t>(options_.branching);
  stationary_.assign(vocab, 1.0 / static_cast<double>(vocab));
  std::vector<double> next(vocab);
  double change = 1;
  for (int round = 0; change > 1e-14; ++round) {
    require(round < 100'000, "the chain of seed {} does not settle: {} left after {} rounds", options_.seed, change, round);
    std::fill(next.begin(), next.end(), 0.0);
    for (std::size_t token = 0; token < vocab; ++token) {
      double before = 0;
      for (std::size_t at = token * branching; at < (token + 1) * branching; ++at) {
        next[successors_[at]] += stationary_[token] * (cumulative_[at] - before);
        before = cumulative_[at];
      }
    }
    const double total = std::accumulate(next.begin(), next.end(), 0.0);
    change = 0;
    for (std::size_t token = 0; token < vocab; ++token) {
      next[token] /= total;
      change += std::abs(next[token] - stationary_[token]);
    }
    std::swap(stationary_, next);
  }

  stationary_cumulative_.resize(vocab);
  std::partial_sum(stationary_.begin(), stationary_.end(), stationary_cumulative_.begin());
  stationary_cumulative_.back() = 1;
  for (std::size_t token = 0; token < vocab; ++token) {
    double before = 0;
    for (std::size_t at = token * branching; at < (token + 1) * branching; ++at) {
      const double probability = cumulative_[at] - before;
      before = cumulative_[at];
      entropy_ -= stationary_[token] * probability * std::log(probability);
    }
  }
}

double MarkovSource::probability(std::int64_t token, std::int64_t next) const {
  require(token >= 0 && token < options_.vocab, "token {} is not below the vocabulary of {}", token, options_.vocab);
  const auto first = static_cast<std::size_t>(token * options_.branching);
  double before = 0;
  for (auto at = first; at < first + static_cast<std::size_t>(options_.branching); ++at) {
    if (successors_[at] == next) return cumulative_[at] - before;
    before = cumulative_[at];
  }
  return 0;
}

void MarkovSource::window(std::uint64_t index, std::span<std::int64_t> tokens) const {
  require(index < options_.size, "sample {} asked of {}", index, options_.size);
  const Random random = samples_.fork(index);
  const auto start = std::upper_bound(stationary_cumulative_.begin(), stationary_cumulative_.end(), random.uniform(0));
  tokens[0] = start - stationary_cumulative_.begin();
  for (std::size_t position = 1; position < tokens.size(); ++position) {
    const auto row = cumulative_.begin() + tokens[position - 1] * options_.branching;
    const auto at = std::upper_bound(row, row + options_.branching, random.uniform(position));
    tokens[position] = successors_[static_cast<std::size_t>(at - cumulative_.begin())];
  }
}

}  // namespace bonfire
