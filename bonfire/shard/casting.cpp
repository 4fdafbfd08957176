#include "bonfire/shard/casting.h"

#include "bonfire/nn/recompute.h"

namespace bonfire {
namespace {

void cast_to(at::ScalarType type, std::vector<at::Tensor>& tensors) {
  for (auto& tensor : tensors)
    if (tensor.is_floating_point() && tensor.scalar_type() != type) tensor = tensor.to(type);
}

std::optional<at::ScalarType> type_of(const std::vector<at::Tensor>& tensors) {
  for (const auto& tensor : tensors)
    if (tensor.is_floating_point()) return tensor.scalar_type();
  return std::nullopt;
}

}  // namespace

void Casting::before_forward(UnitSeam& unit, std::vector<at::Tensor>& inputs) {
  const auto own = types_.of_units.find(&unit);
  const bool has_own = own != types_.of_units.end();
  auto back = has_own ? type_of(inputs) : std::nullopt;
  if (has_own && !back) back = types_.inputs;
  if (const auto type = has_own ? own->second : types_.inputs) cast_to(*type, inputs);
  back_.push_back(back);
}

void Casting::after_forward(UnitSeam&, std::vector<at::Tensor>& outputs) {
  auto type = back_.back();
  back_.pop_back();
  // A forward that runs again runs by itself what was inside of another Unit.
  if (back_.empty() && types_.outputs && !running_again()) type = types_.outputs;
  if (type) cast_to(*type, outputs);
}

}  // namespace bonfire
