#include "bonfire/models/parameter_maker.h"

#include <algorithm>

#include <ATen/ops/empty.h>

#include "bonfire/base/error.h"
#include "bonfire/nn/init.h"

namespace bonfire {
namespace {

// What this part would have of the whole: a function of the whole's names and places alone.
void fill_part(const at::Tensor& tensor, const plan::ParameterDescription& parameter, const BuildOptions& options) {
  std::int64_t at = 0;
  for (const auto& box : parameter.boxes) {
    const std::int64_t rows = box.end[0] - box.begin[0];
    for (const auto& slice : parameter.slices) {
      const std::int64_t begin = std::max(box.begin[0], slice.begin), end = std::min(box.end[0], slice.begin + slice.rows);
      if (begin >= end) continue;
      const at::Tensor own = tensor.narrow(0, at + begin - box.begin[0], end - begin);
      const std::int64_t row = begin - slice.begin, column = box.begin.size() > 1 ? box.begin[1] : 0;
      const std::int64_t columns = parameter.whole.size() > 1 ? parameter.whole[1] : 1;
      const nn::PartOfTensor part = slice.transposed ? nn::PartOfTensor{.begin = {column, row}, .row = slice.rows}
                                                     : nn::PartOfTensor{.begin = {row, column}, .row = columns};
      nn::fill_normal(slice.transposed ? own.t() : own, part, Random(options.seed).fork(slice.name),
                      parameter.init.deviation);
    }
    at += rows;
  }
}

at::Tensor make(const plan::ParameterDescription& parameter, const BuildOptions& options) {
  at::Tensor tensor = at::empty(parameter.shape, at::TensorOptions(options.dtype).device(options.device));
  switch (parameter.init.kind) {
    case plan::InitKind::zeros: tensor.zero_(); break;
    case plan::InitKind::ones: tensor.fill_(1); break;
    case plan::InitKind::normal:
      if (!parameter.boxes.empty()) {
        fill_part(tensor, parameter, options);
        break;
      }
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
