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

// Complete checkpoints: the one that "latest" names, those of steps before it, and those of later steps, which a run has
// left that went back; each from the last step on. Where nothing is named, all from the last step on. Throws ConfigError
// where the folder may not be looked at.
BONFIRE_API std::vector<std::filesystem::path> complete_checkpoints(const std::filesystem::path& folder);
// The first of these; nothing where there is none.
BONFIRE_API std::optional<std::filesystem::path> latest_checkpoint(const std::filesystem::path& folder);

// How the names of files begin by which ranks find out whether they share the folder; they end in ".part", too.
inline constexpr const char* probe_prefix = "shared-";

// Where a checkpoint is written. `mark` sets it apart from those that other runs have left.
BONFIRE_API std::filesystem::path unfinished_checkpoint(const std::filesystem::path& folder, std::int64_t step,
                                                        const std::string& mark);
struct FinishedCheckpoint {
  std::filesystem::path checkpoint, replaced;  // `replaced`: one of the same step, which may go now; empty: there was none
};
// Gives it its name, in place of one of the same step, and points "latest" to it. Its files are on the disk already; so is
// its name when this returns. Throws WriteError.
BONFIRE_API FinishedCheckpoint finish_checkpoint(const std::filesystem::path& unfinished, std::int64_t step);

// All but `newest` and those before it go, until `keep` are left; 0: none. Later ones go first, which a run has left that
// went back, then the oldest.
BONFIRE_API void remove_old_checkpoints(const std::filesystem::path& folder, int keep, const std::filesystem::path& newest);
// What runs that were killed have left; a checkpoint that had made room for another one, which never came, gets its name
// again. REQUIRES: nobody is writing.
BONFIRE_API void remove_unfinished_checkpoints(const std::filesystem::path& folder);

}  // namespace bonfire
