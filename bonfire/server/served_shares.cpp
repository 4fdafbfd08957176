#include "bonfire/server/served_shares.h"

#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>

#include "bonfire/server/description.h"
#include "bonfire/shard/share.h"

namespace bonfire {

ServedShares::ServedShares(const std::vector<plan::ParameterGroup>& units, Group servers) : servers_(std::move(servers)) {
  const int count = servers_.size();
  for (const auto& unit : units) {
    auto layout = layout_of(unit, count);
    std::vector<at::Tensor> parameters;
    for (const auto& parameter : unit.parameters)
      parameters.push_back(at::zeros(parameter.shape, scalar_type(parameter.master)).requires_grad_(true));
    units_.push_back(std::make_unique<FlatParameter>(
        std::move(layout), std::move(parameters),
        FlatOptions{.factors = {.optimizer = count, .gradients = count, .parameters = count}, .rank = servers_.rank()}));
  }
}

std::vector<Shares::Part> ServedShares::parts() const {
  std::vector<Part> parts;
  for (const auto& unit : units_) parts.push_back({.flat = unit.get()});
  return parts;
}

void ServedShares::sum(at::Tensor& numbers) const {
  servers_.all_reduce(numbers).wait();
  if (on_sum && numbers.numel() == 1) on_sum(numbers.item<double>());
}

}  // namespace bonfire
