#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include "bonfire/base/api.h"
#include "bonfire/plan/layout.h"
#include "bonfire/shard/share.h"

namespace bonfire {

// This rank's share of one trained region, as an optimizer sees it: 1-D tensors of one length.
struct TrainedShare {
  std::size_t region = 0;
  Share share{};
  plan::Codec codec = plan::Codec::same;
  at::Tensor master;
  at::Tensor gradient;
  at::Tensor copy;  // what forward reads, where that is not the master itself

  // What an update writes beside the master: a copy that is only rounded. Others are encoded when all ranks are done.
  at::Tensor low_precision() const { return codec == plan::Codec::rounded ? copy : at::Tensor(); }
};

// The codec of the regions of a flat buffer that are read in eight bits: elements are multiplied by scales so that they fill
// the range. Scales follow from the largest magnitudes of whole weights, which ranks with shares of them agree on.
class BONFIRE_API ScaledCodec {
 public:
  // `layout` outlives this.
  ScaledCodec(const plan::FlatLayout& layout, at::Device device);

  // The first values of a segment, which are whole here: returns what is read of them, encoded if they are of these regions.
  at::Tensor begin(std::size_t segment, const at::Tensor& values);
  // fp32 numbers that these shares ask for; the largest of all ranks' are to be agreed on. None: there are no such regions.
  at::Tensor to_agree_on(const std::vector<TrainedShare>& shares) const;
  // Encodes the shares with the numbers that all ranks have agreed on.
  void encode(const at::Tensor& numbers, const std::vector<TrainedShare>& shares);
  // What the elements of a segment are multiplied by when they are read; undefined: it is not in eight bits. Always the same
  // memory: layers hold it.
  at::Tensor inverse(std::size_t segment) const;

 private:
  template <class Body>
  void for_each_part(const std::vector<TrainedShare>& shares, const Body& body) const;
  at::Tensor numbers_of(std::size_t segment, const at::Tensor& all) const;

  const plan::FlatLayout& layout_;
  at::Tensor inverse_;  // of all segments
};

}  // namespace bonfire
