#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>

#include <ATen/core/Tensor.h>

#include "bonfire/base/api.h"
#include "bonfire/checkpoint/manifest.h"

namespace bonfire {

struct ReshardOptions {
  int parts = 1;                                        // files of about the same size
  std::function<void(std::uint64_t bytes)> progress{};  // what was written since the last call
  // Which tensors come along; all, where there is none.
  std::function<bool(const ManifestTensor& tensor)> wanted{};
  // May change values on their way: elements from `at` on of a tensor, counted row by row.
  std::function<void(const ManifestTensor& tensor, std::int64_t at, const at::Tensor& values)> change{};
  bool states = true;  // what is no tensor comes along
};

// Writes the same checkpoint in so many files, tensor after tensor, whoever has saved it: with one part each tensor is
// whole, for readers that know nothing of pieces. Holds a few MiB of it at a time. `to` is there when this returns, complete
// and on the disk, or not at all. Throws ConfigError where it exists already, BrokenCheckpoint, WriteError.
BONFIRE_API void reshard_checkpoint(const std::filesystem::path& from, const std::filesystem::path& to,
                                    const ReshardOptions& options);

}  // namespace bonfire
