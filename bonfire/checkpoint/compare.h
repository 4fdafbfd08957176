#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "bonfire/base/api.h"
#include "bonfire/checkpoint/manifest.h"

namespace bonfire {

// A tensor of a checkpoint, put together from its pieces. Throws BrokenCheckpoint.
BONFIRE_API at::Tensor read_tensor(const std::filesystem::path& checkpoint, const Manifest& manifest,
                                   const ManifestTensor& tensor);

// In what a tensor differs between two checkpoints.
struct TensorDifference {
  enum class What { only_in_first, only_in_second, shape, dtype, values };
  std::string name, kind;
  What what = What::values;
  std::int64_t elements = 0;  // that differ; NaN is the same as NaN
  double largest = 0;         // of the differences of values: infinite where one of the two is not finite
};

// In the order of the first one's manifest, then of the second's. Throws BrokenCheckpoint.
BONFIRE_API std::vector<TensorDifference> compare_checkpoints(const std::filesystem::path& first,
                                                              const std::filesystem::path& second,
                                                              const std::function<void(std::uint64_t bytes)>& progress = {});

}  // namespace bonfire
