#pragma once

#include <cstdint>
#include <optional>

#include <ATen/core/Tensor.h>

#include "bonfire/base/api.h"
#include "bonfire/comm/group.h"
#include "bonfire/plan/layout.h"

// Parts of regions: which elements of a region are a rank's own, and how whole values are cut into parts and put together.
namespace bonfire {

BONFIRE_API at::ScalarType scalar_type(plan::Dtype dtype);
// Throws Error for a type that no region can have.
BONFIRE_API plan::Dtype plan_dtype(at::ScalarType type);

// Whether both begin at the same place and are read in the same type.
BONFIRE_API bool same_memory(const at::Tensor& a, const at::Tensor& b);

// Elements [begin, begin + length) of a region.
struct Share {
  std::int64_t begin = 0;
  std::int64_t length = 0;
};

// What rank `rank` of a shard group owns of a region that is divided by `factor`, which is 1 or the group's size.
BONFIRE_API Share share_of(const plan::Region& region, int factor, int rank);

// What a share has of a segment, in elements of the share; nothing where it has none.
BONFIRE_API std::optional<Share> overlap(const Share& share, const plan::Segment& segment);

// Writes into `part`, which holds `share` of a region, what it has of the segment whose whole value (of any shape) is given.
BONFIRE_API void put_segment(const at::Tensor& part, const Share& share, const plan::Segment& segment,
                             const at::Tensor& value);

// The whole region from every rank's part of it; with a factor of 1 the part itself. Collective over `group`.
BONFIRE_API at::Tensor whole_region(const Group& group, const at::Tensor& part, int factor);

}  // namespace bonfire
