#include "bonfire/checkpoint/compare.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include "bonfire/checkpoint/check_files.h"
#include "bonfire/checkpoint/load.h"
#include "bonfire/checkpoint/piece_reader.h"
#include "bonfire/checkpoint/scalar_types.h"

namespace bonfire {
namespace {

namespace fs = std::filesystem;
using What = TensorDifference::What;

// So that tensors of any size need little memory.
constexpr std::int64_t elements_at_once = std::int64_t{1} << 20;

void compare(const at::Tensor& first, const at::Tensor& second, TensorDifference& found) {
  const double* const left = first.const_data_ptr<double>();
  const double* const right = second.const_data_ptr<double>();
  for (std::int64_t at = 0; at < first.numel(); ++at) {
    if (left[at] == right[at] || (std::isnan(left[at]) && std::isnan(right[at]))) continue;
    ++found.elements;
    const double by = std::abs(left[at] - right[at]);
    found.largest = std::max(found.largest, std::isfinite(by) ? by : std::numeric_limits<double>::infinity());
  }
}

// One of the two, part by part.
class Side {
 public:
  explicit Side(const fs::path& checkpoint)
      : manifest(read_manifest(checkpoint)), reader_(checkpoint, PieceReader::for_columns) {
    check_files(checkpoint, manifest);
  }
  at::Tensor read(const ManifestTensor& tensor, std::int64_t first, std::int64_t count) {
    const auto values = at::empty({count}, at::kDouble);
    reader_.read(tensor, {.box = whole_box(tensor.shape), .first = first, .count = count},
                 [&](std::int64_t at, const at::Tensor& read) { values.narrow(0, at, read.numel()).copy_(read); });
    return values;
  }

  const Manifest manifest;

 private:
  PieceReader reader_;
};

}  // namespace

at::Tensor read_tensor(const fs::path& checkpoint, const Manifest& manifest, const ManifestTensor& tensor) {
  Slice slice = whole_slice(tensor);
  const auto values = at::empty({slice.length}, slice.dtype);
  slice.set = setter(values);
  load_slices(checkpoint, manifest, {slice});
  return values.view(tensor.shape);
}

std::vector<TensorDifference> compare_checkpoints(const fs::path& first, const fs::path& second,
                                                  const std::function<void(std::uint64_t bytes)>& progress) {
  Side one(first), two(second);
  std::vector<TensorDifference> all;
  for (const auto& tensor : one.manifest.tensors) {
    const auto* other = two.manifest.find(tensor.name, tensor.kind);
    TensorDifference found{.name = tensor.name, .kind = tensor.kind};
    if (other == nullptr || other->shape != tensor.shape) {
      found.what = other == nullptr ? What::only_in_first : What::shape;
      all.push_back(found);
      continue;
    }
    const std::int64_t elements = elements_of(whole_box(tensor.shape));
    for (std::int64_t at = 0; at < elements; at += elements_at_once) {
      const std::int64_t count = std::min(elements_at_once, elements - at);
      compare(one.read(tensor, at, count), two.read(*other, at, count), found);
      if (progress) progress(static_cast<std::uint64_t>(count * (bytes_of(tensor.type) + bytes_of(other->type))));
    }
    if (found.elements == 0) {
      if (other->type == tensor.type) continue;
      found.what = What::dtype;
    }
    all.push_back(found);
  }
  for (const auto& tensor : two.manifest.tensors)
    if (one.manifest.find(tensor.name, tensor.kind) == nullptr)
      all.push_back({.name = tensor.name, .kind = tensor.kind, .what = What::only_in_second});
  return all;
}

}  // namespace bonfire
