#include "bonfire/nn/split_arguments.h"

#include <algorithm>

#include <fmt/ranges.h>

#include "bonfire/base/error.h"
#include "bonfire/kernels/argument.h"

namespace bonfire {

using at::Tensor;

void require_between_layers(const char* op, const Tensor& x, const TensorRanks& ranks) {
  require_rows({op, "x", x});
  if (ranks.sequence) return require_sizes({op, "x", x}, {any_size, any_size, any_size}, x);
  require(x.dim() >= 2, "{}: x is [{}]; allowed: two dimensions or more", op, fmt::join(x.sizes(), ", "));
}

void require_split_product(const char* op, const Tensor& x, std::int64_t width, const Tensor& weight, const Tensor& bias) {
  require_sizes({op, "weight", weight}, {any_size, width}, x);
  if (bias.defined()) require_sizes({op, "bias", bias}, {weight.size(0)}, x);
}

void require_norm_between(const char* op, const Tensor& x, const NormWeights& norm) {
  if (norm.weight.defined()) require_sizes({op, "the norm's weight", norm.weight}, {x.size(-1)}, x);
  if (norm.bias.defined()) require_sizes({op, "the norm's bias", norm.bias}, {x.size(-1)}, x);
}

void require_targets_of_rows(const Tensor& x, const Tensor& target, const TensorRanks& ranks) {
  require_integers({"rows_cross_entropy", "target", target});
  const int parts = ranks.sequence ? ranks.group.size() : 1;
  const std::int64_t rows = x.numel() / std::max<std::int64_t>(1, x.size(-1)) * parts;
  require(target.numel() == rows, "rows_cross_entropy: target is [{}] for x of [{}]{}; allowed: {} targets",
          fmt::join(target.sizes(), ", "), fmt::join(x.sizes(), ", "),
          parts > 1 ? fmt::format(" on each of {} ranks", parts) : "", rows);
}

void require_shared_heads(const Tensor& packed, std::int64_t queries) {
  require_sizes({"gather_shared_heads", "packed", packed}, {any_size, any_size, any_size}, packed);
  require(
      queries > 0 && queries < packed.size(2) && (packed.size(2) - queries) % 2 == 0,
      "gather_shared_heads: packed is [{}] with {} elements of queries; allowed: behind them as many of keys as of values",
      fmt::join(packed.sizes(), ", "), queries);
}

std::vector<std::int64_t> sizes_between_layers(const Tensor& x, std::int64_t last, const TensorRanks& ranks) {
  auto sizes = x.sizes().vec();
  sizes.back() = last;
  if (!ranks.sequence) return sizes;
  const std::int64_t parts = ranks.group.size();
  require(sizes[1] % parts == 0, "columns_linear: x is [{}], and {} ranks share its positions; allowed: a multiple of {}",
          fmt::join(x.sizes(), ", "), parts, parts);
  sizes[1] /= parts;
  return sizes;
}

}  // namespace bonfire
