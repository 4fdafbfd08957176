#include "bonfire/nn/parallel_layers.h"

#include <optional>
#include <vector>

#include <ATen/ops/where.h>

#include "bonfire/base/error.h"
#include "bonfire/kernels/embedding.h"
#include "bonfire/nn/made_again.h"

namespace bonfire::nn {

using at::Tensor;

Tensor dropped(const Dropout& dropout, const Tensor& x, const TensorRanks& ranks) {
  if (!ranks.sequence) return dropout(x);
  return dropout.of_part(x, ranks.group.rank() * x.size(1), ranks.group.size() * x.size(1));
}

Tensor ParallelEmbeddingImpl::part(const Tensor& tokens) {
  if (tokens.is_cpu() && tokens.numel() > 0) {
    const bool fits = tokens.ge(0).logical_and_(tokens.lt(rows_.count)).all().item<bool>();
    require(fits, "embedding: a token is none of 0 to {}", rows_.count - 1);
  }
  const Tensor own = tokens.sub(rows_.first);
  const Tensor others = own.lt(0).logical_or_(own.ge(weight.size(0)));
  return embedding(weight, own.masked_fill(others, 0), weight_sink_).masked_fill(others.unsqueeze(-1), 0);
}

Tensor ParallelOutputImpl::whole(const Tensor& x) {
  return gather_columns(rows_linear(x, {}, weight, options(), ranks_).out, rows_.count, ranks_);
}

Tensor ParallelOutputImpl::split_loss(const Tensor& x, const Tensor& target) {
  return rows_cross_entropy(x, weight, target, {.first = rows_.first, .classes = rows_.count, .weight_sink = weight_sink_},
                            ranks_);
}

Tensor ParallelAttentionImpl::forward(const Norm& norm, const Tensor& x) {
  const auto [rows, stream] =
      attended(x, [norm, qkv = qkv_, ranks = ranks_, sharing = sharing_, heads = options_.layout.heads,
                   kv_heads = options_.layout.kv_heads](const Tensor& from) {
        const auto [made, beside] = rows_linear(from, norm->weights(), qkv->weight, qkv->options_after_norm(), ranks);
        const std::int64_t queries = made.size(2) * heads * sharing.size() / (heads * sharing.size() + 2 * kv_heads);
        return Streamed{gather_shared_heads(made, {.queries = queries, .sharing = sharing}), beside};
      });
  // Dropout lies between the product and the sum.
  if (options_.dropout.active())
    return dropped(options_.dropout, columns_linear(rows, output_->weight, {.linear = output_->options()}, ranks_), ranks_)
        .add(stream);
  return columns_linear(rows, output_->weight, {.linear = output_->options(stream)}, ranks_);
}

Tensor ParallelFeedForwardImpl::forward(const Norm& norm, const Tensor& x) {
  const auto go_up = [norm = norm ? norm->weights() : NormWeights{}, up = up_, ranks = ranks_](const Tensor& from) {
    return rows_linear(from, norm, up->weight, up->options_after_norm(), ranks);
  };
  const auto [wide, stream] = go_up(x);
  std::optional<MadeAgain> made;
  if (recompute_) {
    made.emplace(std::vector<Tensor>{x},
                 [go_up](const auto& inputs, std::size_t) { return std::vector<Tensor>{go_up(inputs[0]).out}; });
    made->drop({wide});
  }
  ColumnsLinearOptions down{.activation = activation_, .linear = down_->options_after_activation()};
  if (dropout_.active()) return dropped(dropout_, columns_linear(wide, down_->weight, down, ranks_), ranks_).add(stream);
  down.linear.residual = stream;
  return columns_linear(wide, down_->weight, down, ranks_);
}

}  // namespace bonfire::nn
