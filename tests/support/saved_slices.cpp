#include "tests/support/saved_slices.h"

#include <algorithm>

#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include "bonfire/base/error.h"

namespace bonfire::testing {
namespace {

// Sizes that divide nothing.
constexpr std::int64_t piece = 7;

std::int64_t elements_in(const Shape& shape) { return elements_of(whole_box(shape)); }

// Which elements of the whole tensor, row by row, the slice has.
at::Tensor places_of(const Slice& slice) {
  require(slice.box.begin.size() == slice.shape.size() && slice.begin >= 0 &&
              slice.begin + slice.length <= elements_of(slice.box),
          "slice '{}' ({}) is no part of its tensor", slice.name, slice.kind);
  auto places = at::arange(elements_in(slice.shape)).view(slice.shape);
  for (std::size_t dim = 0; dim < slice.shape.size(); ++dim)
    places = places.slice(static_cast<std::int64_t>(dim), slice.box.begin[dim], slice.box.end[dim]);
  return places.reshape({-1}).narrow(0, slice.begin, slice.length);
}

}  // namespace

void SavedSlices::add(const std::vector<Slice>& slices) {
  const std::lock_guard lock(mutex_);
  for (const auto& slice : slices) {
    const auto places = places_of(slice);
    if (slice.copy != 0) continue;
    auto& entry = entries_[{slice.name, slice.kind}];
    if (!entry.values.defined()) {
      const auto elements = elements_in(slice.shape);
      entry = {at::zeros({elements}, slice.dtype), at::zeros({elements}, at::kLong), slice.shape};
    }
    EXPECT_EQ(entry.values.scalar_type(), slice.dtype) << slice.name << " " << slice.kind;
    for (std::int64_t at = 0; at < slice.length; at += piece) {
      const auto values = at::empty({std::min(piece, slice.length - at)}, slice.dtype);
      slice.read(at, values);
      entry.values.index_copy_(0, places.narrow(0, at, values.numel()), values);
    }
    entry.count.index_add_(0, places, at::ones_like(places));
  }
}

const SavedSlices::Entry& SavedSlices::entry(const Slice& slice) const {
  const auto found = entries_.find({slice.name, slice.kind});
  require(found != entries_.end(), "'{}' ({}) was not saved", slice.name, slice.kind);
  return found->second;
}

void SavedSlices::check(const std::vector<Slice>& slices) const {
  const std::lock_guard lock(mutex_);
  for (const auto& [key, entry] : entries_)
    EXPECT_TRUE(entry.count.eq(1).all().item<bool>()) << key.first << " " << key.second << ": " << entry.count;
  for (const auto& slice : slices)
    EXPECT_TRUE(slice.read().equal(entry(slice).values.index_select(0, places_of(slice))))
        << slice.name << " " << slice.kind << ", copy " << slice.copy;
}

void SavedSlices::load(const std::vector<Slice>& slices) const {
  const std::lock_guard lock(mutex_);
  for (const auto& slice : slices) {
    if (is_hint(slice.kind) && !entries_.contains({slice.name, slice.kind})) continue;
    const auto values = entry(slice).values.index_select(0, places_of(slice));
    for (std::int64_t at = 0; at < slice.length; at += piece)
      slice.write(at, values.narrow(0, at, std::min(piece, slice.length - at)));
  }
}

at::Tensor SavedSlices::at(const std::string& name, const std::string& kind) const {
  const auto& entry = entries_.at({name, kind});
  return entry.values.view(entry.shape);
}

std::vector<std::string> SavedSlices::names(const std::string& kind) const {
  std::vector<std::string> names;
  for (const auto& [key, entry] : entries_)
    if (key.second == kind) names.push_back(key.first);
  return names;
}

}  // namespace bonfire::testing
