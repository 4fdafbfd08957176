#include "bonfire/models/parameter_maker.h"

#include <ATen/ops/empty.h>

#include "bonfire/base/error.h"
#include "bonfire/nn/init.h"

namespace bonfire {
namespace {

at::Tensor make(const plan::ParameterDescription& parameter, const BuildOptions& options) {
  at::Tensor tensor = at::empty(parameter.shape, at::TensorOptions(options.dtype).device(options.device));
  switch (parameter.init.kind) {
    case plan::InitKind::zeros: tensor.zero_(); break;
    case plan::InitKind::ones: tensor.fill_(1); break;
    case plan::InitKind::normal:
      for (const auto& slice : parameter.slices) {
        const at::Tensor rows = tensor.narrow(0, slice.begin, slice.rows);
        nn::fill_normal(slice.transposed ? rows.t() : rows, Random(options.seed).fork(slice.name), parameter.init.deviation);
      }
  }
  tensor.set_requires_grad(parameter.trained);
  return tensor;
}

}  // namespace

at::Tensor ParameterMaker::take(std::string_view name) {
  require(next_ < unit_.parameters.size() && unit_.parameters[next_].name == name,
          "Unit \"{}\" is built with \"{}\" where its description has \"{}\"", unit_.name, name,
          next_ < unit_.parameters.size() ? unit_.parameters[next_].name : "nothing");
  return make(unit_.parameters[next_++], options_);
}

at::Tensor ParameterMaker::take_if_any(std::string_view name) {
  for (const auto& parameter : unit_.parameters)
    if (parameter.name == name) return take(name);
  return {};
}

void ParameterMaker::finish() const {
  require(next_ == unit_.parameters.size(), "Unit \"{}\" is built without \"{}\" of its description", unit_.name,
          next_ < unit_.parameters.size() ? unit_.parameters[next_].name : "");
}

}  // namespace bonfire
