#include "bonfire/shard/slices.h"

#include <algorithm>
#include <optional>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <fmt/ranges.h>

#include "bonfire/base/error.h"
#include "bonfire/shard/flat_parameter.h"
#include "bonfire/shard/shares.h"

namespace bonfire {

Sliced::~Sliced() = default;

void Slice::require_inside(std::int64_t at, const at::Tensor& values) const {
  require(values.dim() == 1 && at >= 0 && at + values.numel() <= length,
          "elements [{}, {}) in a tensor of shape [{}] of slice '{}' ({}), which has {}; allowed: a 1-D tensor of elements "
          "inside of it",
          at, at + values.numel(), fmt::join(values.sizes(), ", "), name, kind, length);
}

void Slice::read(std::int64_t at, const at::Tensor& values) const {
  require_inside(at, values);
  const at::NoGradGuard no_grad;
  get(at, values);
}

at::Tensor Slice::read() const {
  auto values = at::empty({length}, dtype);
  read(0, values);
  return values;
}

void Slice::write(std::int64_t at, const at::Tensor& values) const {
  require_inside(at, values);
  const at::NoGradGuard no_grad;
  set(at, values);
}

Slice::Access getter(at::Tensor from) {
  return [from = std::move(from)](std::int64_t at, const at::Tensor& values) {
    values.copy_(from.narrow(0, at, values.numel()));
  };
}

Slice::Access setter(at::Tensor to, at::Tensor also) {
  return [to = std::move(to), also = std::move(also)](std::int64_t at, const at::Tensor& values) {
    auto part = to.narrow(0, at, values.numel());
    part.copy_(values);
    if (also.defined()) also.narrow(0, at, values.numel()).copy_(part);
  };
}

std::vector<Slice> slices_of(const plan::Placement& placement, std::int64_t first, const at::Tensor& values,
                             const at::Tensor& also) {
  std::vector<Slice> slices;
  for (const auto& [piece, at] : plan::pieces_of(placement, first, values.numel())) {
    const auto part_of = [&, at = at, count = piece.count](const at::Tensor& of) {
      return of.defined() ? of.narrow(0, at, count) : of;
    };
    auto& slice = slices.emplace_back();
    slice.name = placement.name;
    slice.dtype = values.scalar_type();
    slice.shape = placement.shape;
    slice.box = piece.box;
    slice.begin = piece.first;
    slice.length = piece.count;
    slice.get = getter(part_of(values));
    slice.set = setter(part_of(values), part_of(also));
  }
  return slices;
}

std::vector<Slice> parameter_slices(const Shares& shares) {
  std::vector<Slice> slices;
  const auto division = shares.division();
  for (const auto& part : shares.parts()) {
    const auto& flat = *part.flat;
    const auto& layout = flat.layout();
    for (std::size_t at = 0; at < layout.segments.size(); ++at) {
      const auto& segment = layout.segments[at];
      const auto add = [&](const Share& share, int factor, const at::Tensor& values, const at::Tensor& also) {
        const auto own = overlap(share, segment);
        if (!own) return;
        const auto part_of = [&](const at::Tensor& of) { return of.defined() ? of.narrow(0, own->begin, own->length) : of; };
        for (auto& slice :
             slices_of(segment.placement, share.begin + own->begin - segment.offset, part_of(values), part_of(also))) {
          slice.kind = "value";
          slice.copy = division.copy(factor, layout.regions[segment.region].copy);
          slice.copies = division.copies(factor);
          slices.push_back(std::move(slice));
        }
      };
      // What has scales is rounded when all ranks' masters are known.
      for (const auto& share : flat.trained())
        if (share.region == segment.region) add(share.share, division.factor, share.master, share.low_precision());
      const int factor = flat.options().factors.parameters;
      const auto& region = layout.regions[segment.region];
      if (!region.trained)
        add(share_of(region, factor, flat.options().rank), factor, flat.held(segment.region), at::Tensor());
    }
  }
  return slices;
}

// As after an update.
void parameters_written(Shares& shares) {
  const auto parts = shares.parts();
  for (std::size_t part = 0; part < parts.size(); ++part) {
    parts[part].flat->values_changed();
    if (!parts[part].flat->trained().empty()) shares.updated(part);
  }
  shares.finish_update();
}

}  // namespace bonfire
