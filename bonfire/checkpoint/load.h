#pragma once

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "bonfire/base/api.h"
#include "bonfire/checkpoint/manifest.h"
#include "bonfire/comm/group.h"
#include "bonfire/shard/slices.h"

namespace bonfire {

struct LoadSelection {
  // Which tensors are loaded; all, where there is none.
  std::function<bool(const std::string& name, const std::string& kind)> wanted{};
  // Whether tensors of the checkpoint that would be wanted, but have no slice, are an error.
  bool exact = true;
};

// Throws ConfigError, the same on all ranks, unless each of these slices is in the checkpoint with the same shape and, where
// the selection is exact, each of its tensors is asked for by some rank. Collective.
BONFIRE_API void require_same_tensors(const Manifest& manifest, const std::vector<Slice>& slices,
                                      const LoadSelection& selection, const Group& group);
// Writes what the checkpoint has of them into the slices, converted to their type, and reads nothing else. Throws
// BrokenCheckpoint where bytes are not those that were written.
BONFIRE_API void load_slices(const std::filesystem::path& checkpoint, const Manifest& manifest,
                             const std::vector<Slice>& slices, const LoadSelection& selection = {});

// Every byte that it has is what was written. Returns what is wrong, a line each.
BONFIRE_API std::vector<std::string> verify_checkpoint(const std::filesystem::path& checkpoint,
                                                       const std::function<void(std::uint64_t bytes)>& progress = {});

}  // namespace bonfire
