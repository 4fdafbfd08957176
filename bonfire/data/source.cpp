#include "bonfire/data/source.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "bonfire/base/error.h"

namespace bonfire {

std::int64_t SampleField::elements() const {
  std::int64_t product = 1;
  for (const auto size : sizes) product *= size;
  return product;
}

void Source::document_starts(std::uint64_t /*index*/, std::span<std::int64_t> /*starts*/) const {
  fail("documents asked of a source whose samples have none");
}

void TokenSource::read(std::uint64_t index, void* input, void* target) const {
  const auto length = static_cast<std::size_t>(sequence());
  const std::span<std::int64_t> head(static_cast<std::int64_t*>(input), length);
  const std::span<std::int64_t> tail(static_cast<std::int64_t*>(target), length);
  std::vector<std::int64_t> tokens(length + 1);
  window(index, tokens);
  std::copy(tokens.begin(), tokens.end() - 1, head.begin());
  std::copy(tokens.begin() + 1, tokens.end(), tail.begin());
}

SourceSlice::SourceSlice(std::shared_ptr<const Source> whole, std::uint64_t first, std::uint64_t count)
    : whole_(std::move(whole)), first_(first), count_(count) {
  require(first <= whole_->size() && count <= whole_->size() - first, "samples {} to {} + {} asked of a source of {}", first,
          first, count, whole_->size());
}

void SourceSlice::read(std::uint64_t index, void* input, void* target) const {
  require(index < count_, "sample {} asked of {}", index, count_);
  whole_->read(first_ + index, input, target);
}

void SourceSlice::document_starts(std::uint64_t index, std::span<std::int64_t> starts) const {
  require(index < count_, "sample {} asked of {}", index, count_);
  whole_->document_starts(first_ + index, starts);
}

SourceSplit split(std::shared_ptr<const Source> source, double fraction) {
  if (!(fraction > 0 && fraction < 1)) fail_config("held-out fraction is {}, must be between 0 and 1", fraction);
  const auto size = source->size();
  std::uint64_t first = std::uint64_t{1} << 63;
  if (size != unbounded) {
    if (size < 2) fail_config("a source of {} samples cannot be split: both parts need at least one", size);
    const auto held_out = static_cast<std::uint64_t>(std::llround(static_cast<double>(size) * fraction));
    first = size - std::clamp<std::uint64_t>(held_out, 1, size - 1);
  }
  return {std::make_shared<SourceSlice>(source, 0, first), std::make_shared<SourceSlice>(source, first, size - first)};
}

}  // namespace bonfire
