#pragma once

#include <cstdint>
#include <memory>

#include <ATen/core/Tensor.h>

#include "bonfire/base/api.h"
#include "bonfire/comm/group.h"
#include "bonfire/kernels/qkv.h"
#include "bonfire/nn/sequence_places.h"

// Causal attention of ranks that share samples: each has its positions of every one of them (ContextPart).
namespace bonfire {

// How ranks see each other's positions. `ring`: keys and values go round from rank to rank while each attends to those it
// has; what it makes of them comes together by their log-sums. `heads`: for the time of attention each rank has all
// positions of some of the heads, by one all-to-all before and one after it.
enum class ContextWay { ring, heads };

// The ranks along the mesh's context axis. A value: where there is one rank, it has all positions.
struct ContextRanks {
  Group group{};
  ContextWay way = ContextWay::ring;

  bool split() const { return group.size() > 1; }
  ContextPart part() const { return {group.rank(), group.size()}; }
};

// Throws Error where so many ranks cannot attend with these heads.
BONFIRE_API void require_heads(const ContextRanks& ranks, std::int64_t heads, std::int64_t kv_heads);

// self_attention() of samples of which this rank has its positions: [batch, own positions, heads * head_dim]. A row sees
// those before it, and itself, in its own document. `layout.rotary` has all positions. Collective, as is its backward.
BONFIRE_API at::Tensor context_attention(const at::Tensor& qkv, const QkvLayout& layout, const Documents& documents,
                                         const ContextRanks& ranks);

// A mean loss over the targets that this rank has, weighed so that the mean over the ranks is that over all targets: some
// may be ignored. Collective.
BONFIRE_API at::Tensor weighed_by_targets(const at::Tensor& loss, const at::Tensor& own_target, const ContextRanks& ranks);

}  // namespace bonfire
