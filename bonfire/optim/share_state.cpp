#include "bonfire/optim/share_state.h"

#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>

#include "bonfire/shard/shares.h"

namespace bonfire {
namespace {

// The segments of one region, in their order.
std::vector<const plan::Segment*> segments_in(const plan::FlatLayout& layout, std::size_t region) {
  std::vector<const plan::Segment*> found;
  for (const auto& segment : layout.segments)
    if (segment.region == region) found.push_back(&segment);
  return found;
}

bool alike(const plan::FlatLayout& a, std::size_t region_a, const plan::FlatLayout& b, std::size_t region_b) {
  const auto &one = a.regions[region_a], &other = b.regions[region_b];
  const auto left = segments_in(a, region_a), right = segments_in(b, region_b);
  if (one.elements != other.elements || one.master != other.master || left.size() != right.size()) return false;
  for (std::size_t at = 0; at < left.size(); ++at)
    if (left[at]->name != right[at]->name || left[at]->offset != right[at]->offset ||
        left[at]->elements != right[at]->elements)
      return false;
  return true;
}

}  // namespace

bool ShareState::follow(const Shares& shares, std::int64_t steps) {
  if (version_ == shares.layout_version()) return false;
  const at::NoGradGuard no_grad;
  auto old = std::exchange(parts_, {});
  take_layout(shares, steps);
  const Places places = trained_places();
  // All ranks see the same layouts, so they carry the same regions in the same order. What has been carried is let go of
  // before the next.
  for (auto& part : old)
    for (auto& share : part.shares) {
      if (!move(part, share, places)) carry(shares, part, share, places);
      share.tensors.clear();
    }
  for (std::size_t part = 0; part < parts_.size(); ++part)
    for (std::size_t share = 0; share < parts_[part].shares.size(); ++share) made(part, share);
  version_ = shares.layout_version();
  return true;
}

void ShareState::take_layout(const Shares& shares, std::int64_t steps) {
  std::map<Key, std::int64_t> began;
  for (const auto& [flat, stage] : shares.parts()) {
    auto& part = parts_.emplace_back(OfPart{.flat = flat, .stage = stage, .layout = flat->layout(), .shares = {}});
    for (const auto& share : flat->trained()) {
      part.shares.push_back({.region = share.region, .share = share.share, .tensors = {}});
      for (const auto* segment : segments_in(part.layout, share.region)) {
        const Key key{stage, segment->name};
        const auto known = began_.find(key);
        began[key] = known == began_.end() ? steps : known->second;
      }
    }
  }
  began_ = std::move(began);
}

ShareState::Places ShareState::trained_places() const {
  Places places;
  for (std::size_t part = 0; part < parts_.size(); ++part) {
    const auto& [flat, stage, layout, shares] = parts_[part];
    for (std::size_t share = 0; share < shares.size(); ++share)
      for (std::size_t segment = 0; segment < layout.segments.size(); ++segment)
        if (layout.segments[segment].region == shares[share].region)
          places[{stage, layout.segments[segment].name}] = {part, share, segment};
  }
  return places;
}

// A region whose parameters lie as before, though perhaps in another flat parameter, keeps its tensors.
bool ShareState::move(const OfPart& part, OfShare& old, const Places& places) {
  const auto segments = segments_in(part.layout, old.region);
  const auto place = segments.empty() ? places.end() : places.find({part.stage, segments.front()->name});
  if (place == places.end()) return false;
  auto& to = parts_[place->second.part];
  auto& share = to.shares[place->second.share];
  if (!alike(part.layout, old.region, to.layout, share.region)) return false;
  share.tensors = std::move(old.tensors);
  return true;
}

// A segment may have been in other ranks' shares than it will be, so the region is put together first.
void ShareState::carry(const Shares& shares, const OfPart& part, OfShare& old, const Places& places) {
  const auto division = shares.division();
  for (std::size_t at = 0; at < old.tensors.size(); ++at) {
    // Ranks exchange tensors of their device only, and state may lie on the host.
    const auto whole = whole_region(division.ranks, old.tensors[at].to(shares.device()), division.factor);
    for (const auto* segment : segments_in(part.layout, old.region)) {
      const auto found = places.find({part.stage, segment->name});
      if (found == places.end()) continue;
      const auto& place = found->second;
      const auto& to = parts_[place.part];
      put_segment(made(place.part, place.share)[at], to.shares[place.share].share, to.layout.segments[place.segment],
                  whole.narrow(0, segment->offset, segment->elements));
    }
    old.tensors[at].reset();
  }
}

std::vector<at::Tensor>& ShareState::made(std::size_t part, std::size_t share) {
  auto& tensors = parts_[part].shares[share].tensors;
  const auto& master = parts_[part].flat->trained()[share].master;
  // Pinned where the master is: a copy of it, as for a checkpoint, need not pass through other memory.
  while (tensors.size() < tensors_)
    tensors.push_back(at::zeros({master.numel()}, master.options().pinned_memory(master.is_pinned())));
  return tensors;
}

void ShareState::delay(std::int64_t steps) {
  for (auto& [parameter, began] : began_) began += steps;
}

std::int64_t ShareState::bytes() const {
  std::int64_t bytes = 0;
  for (const auto& part : parts_)
    for (const auto& share : part.shares)
      for (const auto& tensor : share.tensors) bytes += static_cast<std::int64_t>(tensor.nbytes());
  return bytes;
}

}  // namespace bonfire
