#include "bonfire/shard/number_slice.h"

#include <algorithm>
#include <utility>

namespace bonfire {
namespace {

Slice slice_with_copy(NumberSlice number, const Shares::Division& division, int copy) {
  Slice slice;
  slice.name = std::move(number.name);
  slice.kind = std::move(number.kind);
  slice.dtype = at::kLong;
  slice.length = 1;
  slice.copy = division.copy(1, copy);
  slice.copies = division.copies(1);
  slice.get = [get = std::move(number.get)](std::int64_t, const at::Tensor& values) { values.fill_(get()); };
  slice.set = [set = std::move(number.set)](std::int64_t, const at::Tensor& values) {
    if (values.numel() > 0) set(values.item<std::int64_t>());
  };
  return slice;
}

}  // namespace

Slice slice_of(NumberSlice number, const Shares::Division& division) {
  return slice_with_copy(std::move(number), division, division.model_copy());
}

Slice slice_of(NumberSlice number, const Shares::Division& division, const plan::Placement& of) {
  const auto& begin = of.boxes.front().begin;
  const bool first = std::all_of(begin.begin(), begin.end(), [](std::int64_t at) { return at == 0; });
  number.name = of.name;
  return slice_with_copy(std::move(number), division, first ? of.copy : of.copy + 1);
}

}  // namespace bonfire
