#include "bonfire/kernels/self_attention.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include "bonfire/kernels/known_sums.h"
#include "bonfire/kernels/operator.h"
#include "bonfire/kernels/product.h"

namespace bonfire {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

using Forward = std::vector<Tensor>(Tensor, const OptionalTensor&, const OptionalTensor&, std::int64_t, std::int64_t, bool,
                                    bool);
using Backward = Tensor(const Tensor&, const Tensor&, const Tensor&, const Tensor&, std::int64_t, std::int64_t, bool);
using Sums = Tensor(const Tensor&, const Tensor&, std::int64_t, std::int64_t);
using TurnBack = void(Tensor, const Tensor&, const Tensor&, std::int64_t, std::int64_t);

struct SelfAttentionNode : BackwardNode {
  QkvLayout layout;
  bool causal = true;
  std::shared_ptr<KnownSums> wanted;

  torch::autograd::variable_list backward(const torch::autograd::variable_list& gradients) override {
    const Tensor d_qkv = BONFIRE_OPERATOR("bonfire::packed_attention_backward", Backward)
                             .call(gradients[0], saved(0), saved(1), saved(2), layout.heads, layout.kv_heads, causal);
    const auto& [cosine, sine] = layout.rotary;
    if (cosine.defined())
      BONFIRE_OPERATOR("bonfire::turn_back_qkv_", TurnBack).call(d_qkv, cosine, sine, layout.heads, layout.kv_heads);
    else if (wanted)
      *wanted = {.gradient = d_qkv,
                 .sums = BONFIRE_OPERATOR("bonfire::packed_attention_sums", Sums)
                             .call(d_qkv, gradients[0], layout.heads, layout.kv_heads)};
    return {d_qkv};
  }
};

// A device without kernels for it.
std::vector<Tensor> no_attention(Tensor qkv, const OptionalTensor& cosine, const OptionalTensor& sine, std::int64_t heads,
                                 std::int64_t kv_heads, bool causal, bool in_place) {
  return {};
}

Tensor sums_composite(const Tensor& d_qkv, const Tensor& d_out, std::int64_t heads, std::int64_t kv_heads) {
  const std::int64_t size = d_qkv.size(2) / (heads + 2 * kv_heads);
  const Tensor of_values = column_sums(d_out.flatten(0, 1)).view({kv_heads, -1, size}).sum(1).flatten();
  return at::cat({column_sums(d_qkv.narrow(2, 0, heads * size).flatten(0, 1)), at::zeros_like(of_values), of_values});
}

}  // namespace

Tensor self_attention(const Tensor& qkv, const QkvLayout& layout, const AttentionShape& shape) {
  require_packed(qkv, layout);
  auto node = make_node<SelfAttentionNode>(qkv);
  std::vector<Tensor> made;
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    const auto optional = [](const Tensor& x) { return x.defined() ? OptionalTensor(x) : std::nullopt; };
    made = BONFIRE_OPERATOR("bonfire::packed_attention", Forward)
               .call(qkv, optional(layout.rotary.cosine), optional(layout.rotary.sine), layout.heads, layout.kv_heads,
                     shape.causal, layout.in_place);
  }
  if (made.empty()) {
    const auto [q, k, v] = split_qkv(qkv, layout);
    if (shape.reads) shape.reads({q, k, v});
    return attention(q, k, v, shape);
  }
  const Tensor &out = made[0], &packed = made[1], &log_sums = made[2];
  if (!node) return out;
  node->layout = layout;
  node->causal = shape.causal;
  node->wanted = sums_wanted(qkv);
  if (shape.reads) shape.reads({packed});
  for (const Tensor& tensor : {packed, out.tensor_data(), log_sums}) node->save(tensor);
  torch::autograd::set_history(out, node);
  return out;
}

std::vector<Tensor> attention_reads(const Tensor& qkv, const QkvLayout& layout, std::size_t count) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  if (count == 1) return {turned_qkv(qkv, layout)};
  const auto [q, k, v] = split_qkv(qkv, layout);
  return {q, k, v};
}

TORCH_LIBRARY_IMPL(bonfire, CompositeExplicitAutograd, m) {
  m.impl("packed_attention", no_attention);
  m.impl("packed_attention_sums", sums_composite);
}

}  // namespace bonfire
