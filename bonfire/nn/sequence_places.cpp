#include "bonfire/nn/sequence_places.h"

#include <algorithm>
#include <utility>

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include "bonfire/base/error.h"

namespace bonfire {
namespace {

using at::Tensor;

// Where the document of a position begins.
class Starts {
 public:
  Starts(const Tensor& starts, std::int64_t sample)
      : row_(starts.defined() ? starts.const_data_ptr<std::int64_t>() + sample * starts.size(1) : nullptr) {}
  std::int64_t operator()(std::int64_t place) const { return row_ ? row_[place] : 0; }

 private:
  const std::int64_t* row_;
};

// As one part, where both are: rows of one after the other over the same keys, or the same rows over keys one after the
// other.
bool joins(AttentionPart& part, const AttentionPart& next) {
  if (part.causal || next.causal) return false;
  if (part.key == next.key && part.keys == next.keys && part.query + part.queries == next.query) {
    part.queries += next.queries;
    return true;
  }
  if (part.query == next.query && part.queries == next.queries && part.key + part.keys == next.key) {
    part.keys += next.keys;
    return true;
  }
  return false;
}

// Consecutive rows of one document.
void add_own(const std::vector<Stretch>& rows, const Starts& starts, std::int64_t first, std::vector<AttentionPart>& parts) {
  std::int64_t document = -1;
  for (const auto& stretch : rows)
    for (std::int64_t at = 0; at < stretch.count; ++at) {
      const std::int64_t start = starts(stretch.place + at), own = first + stretch.own + at;
      if (start != std::exchange(document, start))
        parts.push_back({.query = own, .queries = 0, .key = own, .keys = 0, .causal = true});
      ++parts.back().queries;
      ++parts.back().keys;
    }
}

// Rows of a stretch, and keys of an earlier one: they meet where one document reaches from the keys to the rows.
void add_others(const Stretch& rows, const Stretch& keys, const Starts& starts, std::int64_t first,
                std::vector<AttentionPart>& parts) {
  if (keys.place >= rows.place) return;
  const std::int64_t document = starts(rows.place), begin = std::max(document, keys.place), end = keys.place + keys.count;
  if (begin >= end) return;
  std::int64_t count = 1;
  while (count < rows.count && starts(rows.place + count) == document) ++count;
  const AttentionPart part{.query = first + rows.own,
                           .queries = count,
                           .key = first + keys.own + begin - keys.place,
                           .keys = end - begin,
                           .causal = false};
  if (parts.empty() || !joins(parts.back(), part)) parts.push_back(part);
}

}  // namespace

std::vector<Stretch> stretches_of(const ContextPart& part, std::int64_t count) {
  return stretches_of(part, count, 0, count);
}

std::vector<Stretch> stretches_of(const ContextPart& part, std::int64_t own, std::int64_t begin, std::int64_t count) {
  require(part.ranks >= 1 && part.rank >= 0 && part.rank < part.ranks, "part {} of {} of a sequence", part.rank, part.ranks);
  if (part.ranks == 1) return {{.place = begin, .own = begin, .count = count}};
  require(own % 2 == 0, "{} positions on each of {} ranks; allowed: an even number, for two chunks of one length", own,
          part.ranks);
  const std::int64_t chunk = own / 2, numbers[] = {part.rank, 2 * part.ranks - 1 - part.rank};
  std::vector<Stretch> stretches;
  for (std::int64_t at = 0; at < 2; ++at) {
    const std::int64_t first = std::max(begin, at * chunk), last = std::min(begin + count, (at + 1) * chunk);
    if (first < last)
      stretches.push_back({.place = numbers[at] * chunk + first - at * chunk, .own = first, .count = last - first});
  }
  return stretches;
}

Tensor own_positions(const Tensor& x, const ContextPart& part) {
  if (part.ranks == 1) return x;
  require(x.dim() >= 2 && x.size(1) % (2 * part.ranks) == 0,
          "a sequence of {} positions over {} ranks; allowed: a multiple of {}", x.dim() >= 2 ? x.size(1) : 0, part.ranks,
          2 * part.ranks);
  std::vector<Tensor> pieces;
  for (const auto& stretch : stretches_of(part, x.size(1) / part.ranks))
    pieces.push_back(x.narrow(1, stretch.place, stretch.count));
  return at::cat(pieces, 1);
}

SequencePlaces::SequencePlaces(const ContextPart& part, std::int64_t own, const Tensor& starts) : own_(own) {
  const auto rows = stretches_of(part, own);
  std::vector<Tensor> places;
  for (const auto& stretch : rows) places.push_back(at::arange(stretch.place, stretch.place + stretch.count, at::kLong));
  places_ = at::cat(places);
  if (starts.defined()) {
    require(starts.size(1) == own * part.ranks, "documents of {} positions for samples of {}", starts.size(1),
            own * part.ranks);
    places_ = places_.sub(starts.index_select(1, places_));
  }
  for (int from = 0; from < part.ranks; ++from) seen_.push_back(parts_between(part, from, starts));
}

std::vector<AttentionPart> SequencePlaces::parts_between(const ContextPart& part, int from, const Tensor& starts) const {
  const auto rows = stretches_of(part, own_), keys = stretches_of({from, part.ranks}, own_);
  std::vector<AttentionPart> parts;
  const std::int64_t samples = starts.defined() ? starts.size(0) : 1;
  for (std::int64_t sample = 0; sample < samples; ++sample) {
    const Starts of_sample(starts, sample);
    if (from == part.rank) {
      add_own(rows, of_sample, sample * own_, parts);
      continue;
    }
    for (const auto& one : rows)
      for (const auto& other : keys) add_others(one, other, of_sample, sample * own_, parts);
  }
  return parts;
}

Tensor SequencePlaces::places(at::Device device) const {
  if (!on_device_.defined() || on_device_.device() != device) on_device_ = places_.to(device);
  return on_device_;
}

RotaryTable SequencePlaces::rows_of(const RotaryTable& all) const {
  if (!all.cosine.defined()) return {};
  if (!table_.cosine.is_same(all.cosine)) {
    const Tensor flat = places(all.cosine.device()).flatten();
    const std::int64_t last = own_ == 0 ? -1 : places_.max().item<std::int64_t>();
    require(last < all.cosine.size(0), "a token at position {}; the model knows {} positions", last, all.cosine.size(0));
    table_ = all;
    rows_ = {all.cosine.index_select(0, flat), all.sine.index_select(0, flat)};
  }
  return rows_;
}

Documents::Documents(Tensor starts) : starts_(std::move(starts)) {
  if (!starts_.defined()) return;
  require(starts_.is_cpu() && starts_.dim() == 2 && starts_.scalar_type() == at::kLong,
          "documents are {} {} on {}; allowed: [samples, positions] of int64 on the CPU",
          c10::toString(starts_.scalar_type()), fmt::format("of {} dimensions", starts_.dim()), starts_.device().str());
  starts_ = starts_.contiguous();
  for (std::int64_t sample = 0; sample < starts_.size(0); ++sample) {
    const Starts of_sample(starts_, sample);
    for (std::int64_t at = 0; at < starts_.size(1); ++at)
      require(
          of_sample(at) == at || (at > 0 && of_sample(at) == of_sample(at - 1)),
          "documents: position {} of sample {} is in one that begins at {}; allowed: its own place, or where the document "
          "before it begins",
          at, sample, of_sample(at));
  }
}

std::shared_ptr<const SequencePlaces> Documents::places(const ContextPart& part, std::int64_t own) const {
  auto& places = known_[{part, own}];
  if (!places) places = std::make_shared<SequencePlaces>(part, own, starts_);
  return places;
}

}  // namespace bonfire
