#include "bonfire/kernels/attention_parts.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_scaled_dot_product_flash_attention.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_backward.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/logaddexp.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include "bonfire/base/error.h"
#include "bonfire/kernels/argument.h"
#include "bonfire/kernels/attention.h"
#include "bonfire/kernels/gemm.h"

namespace bonfire {
namespace {

using at::Tensor;

constexpr const char* kOperator = "partial_attention";

enum class Kernel {
  own,        // causal, fp32, on processors where ours are faster; reads groups as they are
  torch_cpu,  // all types of the CPU
  flash,      // bf16 and fp16 on GPUs
  scores,     // anything else; reads groups as they are
};

Kernel kernel_for(const Tensor& q, bool causal) {
  if (q.is_cpu())
    return causal && q.scalar_type() == at::kFloat && cpu::prefers_own_gemm() ? Kernel::own : Kernel::torch_cpu;
  const bool narrow = q.scalar_type() == at::kBFloat16 || q.scalar_type() == at::kHalf;
  return narrow && q.size(3) % 8 == 0 && q.size(3) <= 256 ? Kernel::flash : Kernel::scores;
}

void require_part(const Tensor& q, const Tensor& k, const Tensor& v, bool causal) {
  require_sizes({kOperator, "q", q}, {any_size, any_size, any_size, any_size}, q);
  require_sizes({kOperator, "k", k}, {q.size(0), any_size, any_size, q.size(3)}, q);
  require_alike({kOperator, "v", v}, k);
  require(k.scalar_type() == q.scalar_type(), "{}: q is {}, k is {}; allowed: one type", kOperator,
          c10::toString(q.scalar_type()), c10::toString(k.scalar_type()));
  require(k.size(1) > 0 && q.size(1) % k.size(1) == 0,
          "{}: {} heads of queries, {} of keys; allowed: a number of keys' heads that divides that of queries", kOperator,
          q.size(1), k.size(1));
  require(!causal || q.size(2) == k.size(2), "{}: {} queries and {} keys; allowed of a causal part: as many of both",
          kOperator, q.size(2), k.size(2));
}

// Rows one behind the other, as kernels read them.
Tensor dense(const Tensor& x) { return x.stride(-1) == 1 ? x : x.contiguous(); }

// [batch, heads, queries, size] of memory [batch, queries, heads * size].
Tensor packed_rows(const Tensor& heads) { return heads.transpose(1, 2).reshape({heads.size(0), heads.size(2), -1}); }
Tensor by_heads(const Tensor& rows, std::int64_t heads) {
  return rows.view({rows.size(0), rows.size(1), heads, -1}).transpose(1, 2);
}

// Kernels that know no groups of heads. Where every row meets all keys, the rows of a group are further rows of one head;
// otherwise keys and values are repeated for each of the group.
class Groups {
 public:
  Groups(const Tensor& q, const Tensor& k, bool causal)
      : batch_(q.size(0)), heads_(k.size(1)), group_(q.size(1) / k.size(1)), stacks_(!causal) {}

  Tensor of_queries(const Tensor& x) const {
    if (group_ == 1 || !stacks_) return x;
    return x.contiguous().view({batch_, heads_, group_ * x.size(2), x.size(3)});
  }
  Tensor of_sums(const Tensor& x) const {
    if (group_ == 1 || !stacks_) return x;
    return x.contiguous().view({batch_, heads_, group_ * x.size(2)});
  }
  Tensor of_keys(const Tensor& x) const { return group_ == 1 || stacks_ ? x : x.repeat_interleave(group_, 1); }

  Tensor back(const Tensor& of_queries) const {
    if (group_ == 1 || !stacks_) return of_queries;
    auto sizes = of_queries.sizes().vec();
    sizes[1] = heads_ * group_;
    sizes[2] /= group_;
    return of_queries.reshape(sizes);
  }
  Tensor back_to_keys(const Tensor& of_keys) const {
    if (group_ == 1 || stacks_) return of_keys;
    return of_keys.view({batch_, heads_, group_, of_keys.size(2), of_keys.size(3)}).sum(2);
  }

 private:
  std::int64_t batch_, heads_, group_;
  bool stacks_;
};

struct Library {
  Tensor q, k, v;
};

PartialAttention from_library(const Library& x, bool causal) {
  if (x.q.is_cpu()) {
    auto [out, sums] = at::_scaled_dot_product_flash_attention_for_cpu(x.q, x.k, x.v, 0.0, causal);
    return {std::move(out), std::move(sums)};
  }
  const auto made = at::_scaled_dot_product_flash_attention(x.q, x.k, x.v, 0.0, causal, /*return_debug_mask=*/false);
  return {std::get<0>(made), std::get<1>(made)};
}

PartialAttentionGradients from_library(const Tensor& d_out, const PartialAttentionSaved& x, bool causal) {
  if (x.q.is_cpu()) {
    auto [q, k, v] =
        at::_scaled_dot_product_flash_attention_for_cpu_backward(d_out, x.q, x.k, x.v, x.out, x.log_sums, 0.0, causal);
    return {std::move(q), std::move(k), std::move(v)};
  }
  // Nothing is dropped, so nobody reads where the generator was.
  const Tensor unread = at::zeros({2}, at::TensorOptions(at::kUInt64).device(x.q.device()));
  auto [q, k, v] = at::_scaled_dot_product_flash_attention_backward(d_out, x.q, x.k, x.v, x.out, x.log_sums, {}, {},
                                                                    x.q.size(2), x.k.size(2), 0.0, causal, unread, unread);
  return {std::move(q), std::move(k), std::move(v)};
}

// Some heads of keys of one sample, with the queries that read them.
struct Slice {
  std::int64_t sample, first, heads;
};

template <class Body>
void for_each_slice(const Tensor& q, const Tensor& k, std::int64_t most_bytes, const Body& body) {
  const std::int64_t group = q.size(1) / k.size(1);
  const std::int64_t bytes = group * q.size(2) * k.size(2) * at::elementSize(sum_type(q.scalar_type()));
  const std::int64_t together = std::clamp<std::int64_t>(most_bytes / std::max<std::int64_t>(1, bytes), 1, k.size(1));
  for (std::int64_t sample = 0; sample < q.size(0); ++sample)
    for (std::int64_t first = 0; first < k.size(1); first += together)
      body(Slice{sample, first, std::min(together, k.size(1) - first)});
}

// [heads of keys, queries of a group and their rows, size], in sum_type.
Tensor queries_of(const Tensor& x, const Slice& slice, std::int64_t group) {
  return x[slice.sample]
      .narrow(0, slice.first * group, slice.heads * group)
      .to(sum_type(x.scalar_type()))
      .reshape({slice.heads, group * x.size(2), -1});
}
Tensor keys_of(const Tensor& x, const Slice& slice) {
  return x[slice.sample].narrow(0, slice.first, slice.heads).to(sum_type(x.scalar_type()));
}

Tensor scores_of(const Tensor& q, const Tensor& k, double scale, bool causal) {
  const Tensor scores = at::matmul(q, k.transpose(1, 2)).mul_(scale);
  if (causal) {
    const std::int64_t rows = k.size(1);
    const Tensor later = at::ones({rows, rows}, at::TensorOptions(at::kBool).device(q.device())).triu(1);
    scores.view({q.size(0), -1, rows, rows}).masked_fill_(later, -std::numeric_limits<double>::infinity());
  }
  return scores;
}

double scale_of(const Tensor& q) { return 1 / std::sqrt(static_cast<double>(q.size(3))); }

}  // namespace

at::ScalarType sum_type(at::ScalarType type) { return type == at::kDouble ? at::kDouble : at::kFloat; }

PartialAttention scored_attention(const Tensor& q, const Tensor& k, const Tensor& v, const ScoredOptions& options) {
  require_part(q, k, v, options.causal);
  const at::AutoDispatchBelowADInplaceOrView guard;
  const std::int64_t group = q.size(1) / k.size(1);
  PartialAttention made{at::empty(q.sizes(), q.options()),
                        at::empty({q.size(0), q.size(1), q.size(2)}, q.options().dtype(sum_type(q.scalar_type())))};
  for_each_slice(q, k, options.most_bytes, [&](const Slice& slice) {
    const Tensor scores = scores_of(queries_of(q, slice, group), keys_of(k, slice), scale_of(q), options.causal);
    const Tensor sums = scores.logsumexp(2, /*keepdim=*/true);
    const Tensor out = at::matmul(scores.sub_(sums).exp_(), keys_of(v, slice));
    made.out[slice.sample].narrow(0, slice.first * group, slice.heads * group).copy_(out.view({-1, q.size(2), q.size(3)}));
    made.log_sums[slice.sample].narrow(0, slice.first * group, slice.heads * group).copy_(sums.view({-1, q.size(2)}));
  });
  return made;
}

PartialAttentionGradients scored_attention_backward(const Tensor& d_out, const PartialAttentionSaved& saved,
                                                    const ScoredOptions& options) {
  const auto& [q, k, v, out, log_sums] = saved;
  require_part(q, k, v, options.causal);
  const at::AutoDispatchBelowADInplaceOrView guard;
  const std::int64_t group = q.size(1) / k.size(1);
  PartialAttentionGradients d{at::empty(q.sizes(), q.options()), at::empty(k.sizes(), k.options()),
                              at::empty(v.sizes(), v.options())};
  for_each_slice(q, k, options.most_bytes, [&](const Slice& slice) {
    const Tensor queries = queries_of(q, slice, group), keys = keys_of(k, slice), d_rows = queries_of(d_out, slice, group);
    const Tensor sums = queries_of(log_sums.unsqueeze(3), slice, group);
    const Tensor p = scores_of(queries, keys, scale_of(q), options.causal).sub_(sums).exp_();
    d.v[slice.sample].narrow(0, slice.first, slice.heads).copy_(at::matmul(p.transpose(1, 2), d_rows));
    const Tensor delta = d_rows.mul(queries_of(out, slice, group)).sum(2, /*keepdim=*/true);
    const Tensor d_scores = at::matmul(d_rows, keys_of(v, slice).transpose(1, 2)).sub_(delta).mul_(p).mul_(scale_of(q));
    d.k[slice.sample].narrow(0, slice.first, slice.heads).copy_(at::matmul(d_scores.transpose(1, 2), queries));
    d.q[slice.sample]
        .narrow(0, slice.first * group, slice.heads * group)
        .copy_(at::matmul(d_scores, keys).view({-1, q.size(2), q.size(3)}));
  });
  return d;
}

PartialAttention partial_attention(const Tensor& q, const Tensor& k, const Tensor& v, bool causal) {
  require_part(q, k, v, causal);
  const at::AutoDispatchBelowADInplaceOrView guard;
  switch (kernel_for(q, causal)) {
    case Kernel::own: {
      auto made = cpu::causal_attention(q.contiguous(), k.contiguous(), v.contiguous());
      return {by_heads(made.out, q.size(1)), std::move(made.log_sums)};
    }
    case Kernel::scores: return scored_attention(q, k, v, {.causal = causal});
    case Kernel::torch_cpu:
    case Kernel::flash: break;
  }
  const Groups groups(q, k, causal);
  const auto made =
      from_library(Library{dense(groups.of_queries(q)), dense(groups.of_keys(k)), dense(groups.of_keys(v))}, causal);
  return {groups.back(made.out), groups.back(made.log_sums)};
}

PartialAttentionGradients partial_attention_backward(const Tensor& d_out, const PartialAttentionSaved& saved, bool causal) {
  const auto& [q, k, v, out, log_sums] = saved;
  require_part(q, k, v, causal);
  require_alike({kOperator, "d_out", d_out}, q);
  require_alike({kOperator, "out", out}, q);
  require_sizes({kOperator, "log_sums", log_sums}, {q.size(0), q.size(1), q.size(2)}, q);
  const at::AutoDispatchBelowADInplaceOrView guard;
  switch (kernel_for(q, causal)) {
    case Kernel::own: {
      auto d = cpu::causal_attention_backward(packed_rows(d_out).contiguous(), {.q = q.contiguous(),
                                                                                .k = k.contiguous(),
                                                                                .v = v.contiguous(),
                                                                                .out = packed_rows(out).contiguous(),
                                                                                .log_sums = log_sums.contiguous()});
      return {std::move(d.q), std::move(d.k), std::move(d.v)};
    }
    case Kernel::scores: return scored_attention_backward(d_out, saved, {.causal = causal});
    case Kernel::torch_cpu:
    case Kernel::flash: break;
  }
  const Groups groups(q, k, causal);
  const auto d = from_library(dense(groups.of_queries(d_out)),
                              {.q = dense(groups.of_queries(q)),
                               .k = dense(groups.of_keys(k)),
                               .v = dense(groups.of_keys(v)),
                               .out = dense(groups.of_queries(out)),
                               .log_sums = groups.of_sums(log_sums).contiguous()},
                              causal);
  return {groups.back(d.q), groups.back_to_keys(d.k), groups.back_to_keys(d.v)};
}

void add_part(const Tensor& out, const Tensor& log_sums, const PartialAttention& part) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  const Tensor both = at::logaddexp(log_sums, part.log_sums);
  const auto weight = [&](const Tensor& of) { return of.sub(both).exp_().transpose(1, 2).unsqueeze(3); };
  out.mul_(weight(log_sums)).addcmul_(part.out.transpose(1, 2).to(out.scalar_type()), weight(part.log_sums));
  log_sums.copy_(both);
}

}  // namespace bonfire
