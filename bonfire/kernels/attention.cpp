#include "bonfire/kernels/attention.h"

#include <ATen/Context.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_scaled_dot_product_cudnn_attention.h>
#include <ATen/ops/scaled_dot_product_attention.h>

#include "bonfire/base/error.h"
#include "bonfire/kernels/argument.h"
#include "bonfire/kernels/backward_node.h"
#include "bonfire/kernels/gemm.h"

namespace bonfire {
namespace {

using at::Tensor;

struct AttentionNode : BackwardNode {
  torch::autograd::variable_list backward(const torch::autograd::variable_list& gradients) override {
    auto d = cpu::causal_attention_backward(
        gradients[0].contiguous(), {.q = saved(0), .k = saved(1), .v = saved(2), .out = saved(3), .log_sums = saved(4)});
    return {d.q, d.k, d.v};
  }
};

bool suits_cudnn(const Tensor& q, const Tensor& k) {
  return q.is_cuda() && q.size(2) == k.size(2) && cudnn_takes_attention(q.scalar_type(), q.size(3), q.size(2));
}

// [batch, heads, sequence, size] to [batch, sequence, heads * size].
Tensor side_by_side(const Tensor& heads) { return heads.transpose(1, 2).reshape({heads.size(0), heads.size(2), -1}); }

bool suits_own(const Tensor& x) { return x.is_cpu() && x.scalar_type() == at::kFloat; }

}  // namespace

bool cudnn_takes_attention(at::ScalarType type, std::int64_t head_dim, std::int64_t sequence) {
  return (type == at::kBFloat16 || type == at::kHalf) && head_dim % 8 == 0 && head_dim <= 128 && sequence > 1 &&
         !at::globalContext().deterministicAlgorithms();
}

Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionShape& shape) {
  require_sizes({"attention", "q", q}, {any_size, any_size, any_size, any_size}, q);
  require_sizes({"attention", "k", k}, {q.size(0), any_size, any_size, q.size(3)}, q);
  require_alike({"attention", "v", v}, k);
  require(k.scalar_type() == q.scalar_type(), "attention: q is {}, k is {}; allowed: one type",
          c10::toString(q.scalar_type()), c10::toString(k.scalar_type()));
  require(k.size(1) > 0 && q.size(1) % k.size(1) == 0,
          "attention: {} heads of queries, {} of keys; allowed: a number of keys' heads that divides that of queries",
          q.size(1), k.size(1));
  const bool own =
      shape.causal && cpu::prefers_own_gemm() && suits_own(q) && suits_own(k) && suits_own(v) && q.size(2) == k.size(2);
  if (suits_cudnn(q, k)) {
    const bool trained = torch::autograd::compute_requires_grad(q, k, v);
    try {
      return side_by_side(std::get<0>(at::_scaled_dot_product_cudnn_attention(q, k, v, {}, trained, 0.0, shape.causal)));
    } catch (const c10::Error&) {
      // A version of cuDNN, or a GPU, that does not take it: torch chooses below.
    }
  }
  if (!own) {
    const std::int64_t group = q.size(1) / k.size(1);
    // In four bytes torch has no kernel for groups but one that holds the weight of every pair of positions.
    const bool repeats = group > 1 && q.is_cuda() && q.scalar_type() == at::kFloat;
    const auto for_queries = [&](const Tensor& of_keys) { return repeats ? of_keys.repeat_interleave(group, 1) : of_keys; };
    return side_by_side(at::scaled_dot_product_attention(q, for_queries(k), for_queries(v), {}, 0.0, shape.causal,
                                                         std::nullopt, group > 1 && !repeats));
  }
  const Tensor dense_q = q.contiguous(), dense_k = k.contiguous(), dense_v = v.contiguous();
  auto node = make_node<AttentionNode>(dense_q, dense_k, dense_v);
  cpu::AttentionForward forward;
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    forward = cpu::causal_attention(dense_q, dense_k, dense_v);
  }
  if (!node) return forward.out;
  for (const Tensor& tensor : {dense_q, dense_k, dense_v, forward.out.tensor_data(), forward.log_sums}) node->save(tensor);
  torch::autograd::set_history(forward.out, node);
  return forward.out;
}

}  // namespace bonfire
