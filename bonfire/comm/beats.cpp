#include "bonfire/comm/beats.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <numeric>

#include <fmt/format.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "bonfire/comm/store_bytes.h"

namespace bonfire {
namespace {

std::string key_of(int rank) { return fmt::format("watchdog/rank/{}", rank); }
std::string lanes_key_of(int rank) { return fmt::format("watchdog/groups/{}", rank); }

std::vector<std::string> keys_of(const std::vector<int>& ranks, std::string (*key)(int)) {
  std::vector<std::string> keys;
  keys.reserve(ranks.size());
  for (const int rank : ranks) keys.push_back(key(rank));
  return keys;
}

}  // namespace

Beats::Beats(c10d::Store& store, int rank, int size, Nanoseconds now)
    : store_(store),
      rank_(rank),
      everybody_(static_cast<std::size_t>(size)),
      seen_(static_cast<std::size_t>(size), Seen{.at = now}) {
  std::iota(everybody_.begin(), everybody_.end(), 0);
  missing_ = everybody_;
}

void Beats::publish(const Progress& progress) {
  if (progress.lanes.size() != lanes_told_) {
    store_.set(lanes_key_of(rank_), encode_lanes(progress));
    lanes_told_ = progress.lanes.size();
  }
  // The count makes every sign of life differ from the one before.
  ++beat_;
  store_.set(key_of(rank_), std::string(reinterpret_cast<const char*>(&beat_), sizeof beat_) + encode_numbers(progress));
}

const std::vector<Beats::Seen>& Beats::look(Nanoseconds now) {
  if (!missing_.empty() && store_.check(keys_of(missing_, key_of))) missing_.clear();
  // At the start, or where one never comes: those that have come are found one by one, and not asked for again.
  if (missing_.size() > 1) std::erase_if(missing_, [&](int rank) { return store_.check({key_of(rank)}); });
  std::vector<int> there;
  std::set_difference(everybody_.begin(), everybody_.end(), missing_.begin(), missing_.end(), std::back_inserter(there));
  read(there, now);
  return seen_;
}

void Beats::read(const std::vector<int>& ranks, Nanoseconds now) {
  if (ranks.empty()) return;
  const auto texts = store_.multiGet(keys_of(ranks, key_of));
  std::vector<int> changed, with_new_lanes;
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    Seen& seen = seen_[static_cast<std::size_t>(ranks[i])];
    std::string text = text_of(texts[i]);
    if (text == seen.numbers) continue;
    seen.numbers = std::move(text);
    seen.at = now;
    changed.push_back(ranks[i]);
    if (seen.numbers.size() < sizeof beat_) continue;
    if (lanes_of(seen.numbers.substr(sizeof beat_)).value_or(0) > seen.lanes.size()) with_new_lanes.push_back(ranks[i]);
  }
  read_lanes(with_new_lanes);
  for (const int rank : changed) {
    Seen& seen = seen_[static_cast<std::size_t>(rank)];
    if (seen.numbers.size() < sizeof beat_) continue;
    if (auto progress = decode_progress(seen.numbers.substr(sizeof beat_), seen.lanes)) seen.progress = std::move(*progress);
  }
}

void Beats::read_lanes(const std::vector<int>& ranks) {
  if (ranks.empty()) return;
  const auto texts = store_.multiGet(keys_of(ranks, lanes_key_of));
  for (std::size_t i = 0; i < ranks.size(); ++i)
    if (auto lanes = decode_lanes(text_of(texts[i]))) seen_[static_cast<std::size_t>(ranks[i])].lanes = std::move(*lanes);
}

}  // namespace bonfire
