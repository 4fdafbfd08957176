#include "tests/random/optimizer_of.h"

#include <ATen/core/Tensor.h>

namespace bonfire::cases {

std::unique_ptr<Optimizer> optimizer_of(const Update& update, Shares& shares) {
  std::vector<ParameterRule> rules;
  if (update.less_for_vectors)
    rules.push_back({[](const std::string&, const at::Tensor& parameter) { return parameter.dim() < 2; }, 0.5, 0});
  if (update.rule == Rule::sgd)
    return std::make_unique<Sgd>(shares, SgdOptions{.lr = update.lr,
                                                    .momentum = update.momentum,
                                                    .dampening = update.dampening,
                                                    .weight_decay = update.weight_decay,
                                                    .nesterov = update.nesterov,
                                                    .maximize = update.maximize,
                                                    .rules = rules});
  const AdamOptions adam{.lr = update.lr,
                         .eps = adam_eps,
                         .weight_decay = update.weight_decay,
                         .amsgrad = update.amsgrad,
                         .maximize = update.maximize,
                         .rules = rules};
  if (update.rule == Rule::adam) return std::make_unique<Adam>(shares, adam);
  return std::make_unique<AdamW>(shares, adam);
}

}  // namespace bonfire::cases
