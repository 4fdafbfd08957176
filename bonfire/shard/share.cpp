#include "bonfire/shard/share.h"

#include <algorithm>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include "bonfire/base/error.h"

namespace bonfire {

at::ScalarType scalar_type(plan::Dtype dtype) {
  switch (dtype) {
    case plan::Dtype::fp64: return at::kDouble;
    case plan::Dtype::fp32: return at::kFloat;
    case plan::Dtype::bf16: return at::kBFloat16;
    case plan::Dtype::fp16: return at::kHalf;
    case plan::Dtype::fp8: return at::kFloat8_e4m3fn;
  }
  return at::kFloat;
}

plan::Dtype plan_dtype(at::ScalarType type) {
  switch (type) {
    case at::kDouble: return plan::Dtype::fp64;
    case at::kFloat: return plan::Dtype::fp32;
    case at::kBFloat16: return plan::Dtype::bf16;
    case at::kHalf: return plan::Dtype::fp16;
    case at::kFloat8_e4m3fn: return plan::Dtype::fp8;
    default: fail("dtype {} cannot be sharded; allowed are fp64, fp32, bf16, fp16 and fp8 (e4m3)", c10::toString(type));
  }
}

bool same_memory(const at::Tensor& a, const at::Tensor& b) {
  return a.data_ptr() == b.data_ptr() && a.scalar_type() == b.scalar_type();
}

Share share_of(const plan::Region& region, int factor, int rank) {
  const std::int64_t length = region.elements / factor;
  return {length * (rank % factor), length};
}

std::optional<Share> overlap(const Share& share, const plan::Segment& segment) {
  const std::int64_t begin = std::max(share.begin, segment.offset);
  const std::int64_t end = std::min(share.begin + share.length, segment.offset + segment.elements);
  if (begin >= end) return std::nullopt;
  return Share{begin - share.begin, end - begin};
}

void put_segment(const at::Tensor& part, const Share& share, const plan::Segment& segment, const at::Tensor& value) {
  const auto own = overlap(share, segment);
  if (!own) return;
  const at::NoGradGuard no_grad;
  part.narrow(0, own->begin, own->length)
      .copy_(value.detach().reshape({-1}).narrow(0, share.begin + own->begin - segment.offset, own->length));
}

at::Tensor whole_region(const Group& group, const at::Tensor& part, int factor) {
  if (factor == 1) return part;
  const at::NoGradGuard no_grad;
  auto whole = at::empty({part.numel() * factor}, part.options());
  group.all_gather(whole, part).wait();
  return whole;
}

}  // namespace bonfire
