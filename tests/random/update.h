#pragma once

namespace bonfire::cases {

enum class Rule { sgd, adam, adamw };

struct Update {
  Rule rule = Rule::sgd;
  double lr = 0.1;
  double momentum = 0, dampening = 0, weight_decay = 0;
  bool nesterov = false, maximize = false, amsgrad = false;
  double clip = 0, clip_value = 0;
  bool less_for_vectors = false;  // half the rate and no decay for what has fewer than two dimensions
};

// Adam's eps in all cases: large, so that a gradient of zero does not turn rounding into a step.
inline constexpr double adam_eps = 1e-2;

}  // namespace bonfire::cases
