#include "bonfire/shard/input_cast.h"

namespace bonfire {

void cast_to(at::ScalarType type, std::vector<at::Tensor>& tensors) {
  for (auto& tensor : tensors)
    if (tensor.is_floating_point() && tensor.scalar_type() != type) tensor = tensor.to(type);
}

void InputCast::before_forward(UnitSeam&, std::vector<at::Tensor>& inputs) { cast_to(type_, inputs); }

}  // namespace bonfire
