#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "bonfire/base/api.h"

// The folder in which the checkpoints of a run are: one folder each, "step-00000100", and a file "latest" that names the one
// that was completed last. What is not complete yet, or not any more, has a name that ends in ".part".
namespace bonfire {

BONFIRE_API std::string checkpoint_name(std::int64_t step);

// Complete checkpoints, those of later steps first.
BONFIRE_API std::vector<std::filesystem::path> complete_checkpoints(const std::filesystem::path& folder);
// The one of the latest step; nothing where there is none.
BONFIRE_API std::optional<std::filesystem::path> latest_checkpoint(const std::filesystem::path& folder);

// Where a checkpoint is written. `mark` sets it apart from those that other runs have left.
BONFIRE_API std::filesystem::path unfinished_checkpoint(const std::filesystem::path& folder, std::int64_t step,
                                                        const std::string& mark);
// Gives it its name, in place of one of the same step, and points "latest" to it. Its files are on the disk already; so is
// its name when this returns. Throws WriteError.
BONFIRE_API std::filesystem::path finish_checkpoint(const std::filesystem::path& unfinished, std::int64_t step);

// All but `newest` and those before it go, until `keep` are left; 0: none. Later ones go first, which a run has left that
// went back, then the oldest.
BONFIRE_API void remove_old_checkpoints(const std::filesystem::path& folder, int keep, const std::filesystem::path& newest);
// What runs that were killed have left. REQUIRES: nobody is writing.
BONFIRE_API void remove_unfinished_checkpoints(const std::filesystem::path& folder);

}  // namespace bonfire
