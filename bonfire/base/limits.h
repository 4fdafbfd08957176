#pragma once

#include <algorithm>
#include <cstdint>

// Numbers that two rooms must agree on: one keeps to them, the other predicts what that costs.
namespace bonfire {

// A model's head makes no more logits than this at a time.
inline constexpr std::int64_t most_logit_bytes = std::int64_t{1} << 32;

// Rows of the chunks in which it makes more: chunks of one size, so that none is a small rest.
constexpr std::int64_t rows_of_chunk(std::int64_t rows, std::int64_t row_bytes, std::int64_t most_bytes = most_logit_bytes) {
  const std::int64_t most = std::max<std::int64_t>(1, most_bytes / row_bytes), chunks = (rows + most - 1) / most;
  return chunks == 0 ? 1 : std::min(most, ((rows + chunks - 1) / chunks + 127) / 128 * 128);
}

}  // namespace bonfire
