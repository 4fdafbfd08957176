#include "bonfire/optim/share_state.h"

#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>

#include "bonfire/shard/engine.h"

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

bool ShareState::follow(const Engine& engine, std::int64_t steps) {
  if (version_ == engine.layout_version()) return false;
  const at::NoGradGuard no_grad;
  auto old = std::exchange(flats_, {});
  take_layout(engine, steps);
  const Places places = trained_places();
  // All ranks see the same layouts, so they carry the same regions in the same order. What has been carried is let go of
  // before the next.
  for (auto& flat : old)
    for (auto& share : flat.shares) {
      if (!move(flat, share, places)) carry(engine, flat, share, places);
      share.tensors.clear();
    }
  for (std::size_t flat = 0; flat < flats_.size(); ++flat)
    for (std::size_t share = 0; share < flats_[flat].shares.size(); ++share) made(engine, flat, share);
  version_ = engine.layout_version();
  return true;
}

void ShareState::take_layout(const Engine& engine, std::int64_t steps) {
  std::map<std::string, std::int64_t> began;
  for (const auto& flat : engine.flats()) {
    auto& state = flats_.emplace_back(OfFlat{.layout = flat->layout(), .shares = {}});
    for (const auto& share : flat->trained()) {
      state.shares.push_back({.region = share.region, .share = share.share, .tensors = {}});
      for (const auto* segment : segments_in(state.layout, share.region)) {
        const auto known = began_.find(segment->name);
        began[segment->name] = known == began_.end() ? steps : known->second;
      }
    }
  }
  began_ = std::move(began);
}

ShareState::Places ShareState::trained_places() const {
  Places places;
  for (std::size_t flat = 0; flat < flats_.size(); ++flat)
    for (std::size_t share = 0; share < flats_[flat].shares.size(); ++share)
      for (std::size_t segment = 0; segment < flats_[flat].layout.segments.size(); ++segment)
        if (flats_[flat].layout.segments[segment].region == flats_[flat].shares[share].region)
          places[flats_[flat].layout.segments[segment].name] = {flat, share, segment};
  return places;
}

// A region whose parameters lie as before, though perhaps in another flat parameter, keeps its tensors.
bool ShareState::move(const OfFlat& flat, OfShare& old, const Places& places) {
  const auto segments = segments_in(flat.layout, old.region);
  const auto place = segments.empty() ? places.end() : places.find(segments.front()->name);
  if (place == places.end()) return false;
  auto& to = flats_[place->second.flat];
  auto& share = to.shares[place->second.share];
  if (!alike(flat.layout, old.region, to.layout, share.region)) return false;
  share.tensors = std::move(old.tensors);
  return true;
}

// A segment may have been in other ranks' shares than it will be, so the region is put together first.
void ShareState::carry(const Engine& engine, const OfFlat& flat, OfShare& old, const Places& places) {
  const int factor = engine.factors().optimizer;
  const auto device = engine.flats().front()->parameters().front().device();
  for (std::size_t at = 0; at < old.tensors.size(); ++at) {
    // Ranks exchange tensors of their device only, and state may lie on the host.
    const auto part = old.tensors[at].to(device);
    const auto whole = whole_region(engine.mesh().group(Axis::shard), part, factor);
    for (const auto* segment : segments_in(flat.layout, old.region)) {
      const auto found = places.find(segment->name);
      if (found == places.end()) continue;
      const auto& place = found->second;
      const auto& to = flats_[place.flat];
      put_segment(made(engine, place.flat, place.share)[at], to.shares[place.share].share, to.layout.segments[place.segment],
                  whole.narrow(0, segment->offset, segment->elements));
    }
    old.tensors[at].reset();
  }
}

std::vector<at::Tensor>& ShareState::made(const Engine& engine, std::size_t flat, std::size_t share) {
  auto& tensors = flats_[flat].shares[share].tensors;
  const auto& master = engine.flats()[flat]->trained()[share].master;
  // Pinned where the master is: a copy of it, as for a checkpoint, need not pass through other memory.
  while (tensors.size() < tensors_)
    tensors.push_back(at::zeros({master.numel()}, master.options().pinned_memory(master.is_pinned())));
  return tensors;
}

std::int64_t ShareState::bytes() const {
  std::int64_t bytes = 0;
  for (const auto& flat : flats_)
    for (const auto& share : flat.shares)
      for (const auto& tensor : share.tensors) bytes += static_cast<std::int64_t>(tensor.nbytes());
  return bytes;
}

}  // namespace bonfire
