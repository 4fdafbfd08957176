#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include <ATen/core/Tensor.h>

#include "bonfire/base/api.h"
#include "bonfire/base/limits.h"
#include "bonfire/kernels/fused_linear.h"
#include "bonfire/nn/sequence_regions.h"

// Products whose weight is split among ranks. What one rank alone fuses is cut where ranks have to speak, and stays one node
// of autograd's graph, so that they speak while it multiplies: the gradient of what comes in travels while that of the
// weight is made.
namespace bonfire {

// norm(x) weight^T + bias for the rows of a weight that this rank has; without a norm, of x itself. x is what lies between
// split layers; the result has all positions. Neither the norm nor, with a split sequence, the gathered x is kept.
BONFIRE_API Streamed rows_linear(const at::Tensor& x, const NormWeights& norm, const at::Tensor& weight,
                                 const LinearOptions& options, const TensorRanks& ranks);

struct ColumnsLinearOptions {
  std::optional<Activation> activation{};  // of what the product reads
  LinearOptions linear{};                  // its bias and residual are added once, to the sum
};
// The sum over ranks of activation(x) weight^T for the columns of a weight that this rank has, plus bias and residual. x has
// all positions; the result is what lies between split layers, as is the residual. All ranks have the whole bias.
BONFIRE_API at::Tensor columns_linear(const at::Tensor& x, const at::Tensor& weight, const ColumnsLinearOptions& options,
                                      const TensorRanks& ranks);

// The norm of what lies between split layers.
BONFIRE_API at::Tensor norm_between(const at::Tensor& x, const NormWeights& norm, const TensorRanks& ranks);

// The loss of x, what lies between split layers, against `target`, for the rows [first, first + weight.size(0)) of an output
// weight that has `classes`. The whole logits exist nowhere.
struct SplitLossOptions {
  std::int64_t first = 0, classes = 0;
  std::shared_ptr<GradientSink> weight_sink{};
  std::int64_t most_logit_bytes = bonfire::most_logit_bytes;
};
BONFIRE_API at::Tensor rows_cross_entropy(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& target,
                                          const SplitLossOptions& options, const TensorRanks& ranks);

// The packed product [batch, sequence, own heads of queries, then of keys and values what the rank has made] with whole
// heads of keys and values, where `sharing` neighbouring ranks read the same head and each has made some of its rows.
struct SharedHeads {
  std::int64_t queries = 0;  // elements of the own heads of queries
  Group sharing{};
};
BONFIRE_API at::Tensor gather_shared_heads(const at::Tensor& packed, const SharedHeads& heads);

}  // namespace bonfire
