#pragma once

#include <cstdint>

// Numbers that two rooms must agree on: one keeps to them, the other predicts what that costs.
namespace bonfire {

// A model's head makes no more logits than this at a time.
inline constexpr std::int64_t most_logit_bytes = std::int64_t{1} << 30;

}  // namespace bonfire
