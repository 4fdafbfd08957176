#include "bonfire/shard/scaled_codec.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include "bonfire/base/size.h"
#include "bonfire/kernels/scaled_weight.h"

namespace bonfire {

ScaledCodec::ScaledCodec(const plan::FlatLayout& layout, at::Device device)
    : layout_(layout),
      inverse_(inverse_scales(at::zeros({layout.scales()}, at::TensorOptions(at::kFloat).device(device)))) {}

at::Tensor ScaledCodec::numbers_of(std::size_t segment, const at::Tensor& all) const {
  std::int64_t begin = 0;
  for (std::size_t at = 0; at < segment; ++at) begin += round_up(layout_.segments[at].scales, plan::scale_alignment);
  return all.narrow(0, begin, layout_.segments[segment].scales);
}

at::Tensor ScaledCodec::inverse(std::size_t segment) const {
  return layout_.segments[segment].scales > 0 ? numbers_of(segment, inverse_) : at::Tensor();
}

at::Tensor ScaledCodec::begin(std::size_t segment, const at::Tensor& values) {
  if (layout_.segments[segment].scales == 0) return values;
  const auto& [elements, scales] = std::pair(layout_.segments[segment].elements, layout_.segments[segment].scales);
  const WeightPart whole{.elements = values.detach().reshape({-1}), .each = elements / scales};
  const auto magnitudes = at::zeros({scales}, inverse_.options());
  note_magnitudes(magnitudes, whole);
  auto encoded = at::empty({elements}, values.options().dtype(at::kFloat8_e4m3fn));
  round_scaled(encoded, whole, magnitudes);
  inverse(segment).copy_(inverse_scales(magnitudes));
  return encoded;
}

// Calls `body(segment, part of the master, its place in the copy)` for what this rank updates of segments with scales.
template <class Body>
void ScaledCodec::for_each_part(const std::vector<TrainedShare>& shares, const Body& body) const {
  for (std::size_t at = 0; at < layout_.segments.size(); ++at) {
    const auto& segment = layout_.segments[at];
    for (const auto& share : shares) {
      const auto part = overlap(share.share, segment);
      if (share.region != segment.region || segment.scales == 0 || !part) continue;
      const auto own = [&](const at::Tensor& of) { return of.narrow(0, part->begin, part->length); };
      body(at,
           WeightPart{.elements = own(share.master),
                      .first = share.share.begin + part->begin - segment.offset,
                      .each = segment.elements / segment.scales},
           own(share.copy));
    }
  }
}

at::Tensor ScaledCodec::to_agree_on(const std::vector<TrainedShare>& shares) const {
  const auto numbers = at::zeros_like(inverse_);
  for_each_part(shares, [&](std::size_t segment, const WeightPart& part, const at::Tensor&) {
    note_magnitudes(numbers_of(segment, numbers), part);
  });
  return numbers;
}

void ScaledCodec::encode(const at::Tensor& numbers, const std::vector<TrainedShare>& shares) {
  // In place: layers hold views of it.
  inverse_.copy_(inverse_scales(numbers));
  for_each_part(shares, [&](std::size_t segment, const WeightPart& part, const at::Tensor& copy) {
    round_scaled(copy, part, numbers_of(segment, numbers));
  });
}

}  // namespace bonfire
