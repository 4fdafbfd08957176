#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "bonfire/base/api.h"
#include "bonfire/checkpoint/manifest.h"
#include "bonfire/shard/slices.h"

// The file that one rank writes of a checkpoint.
namespace bonfire {

// Elements [first, first + count) of a slice, which this rank writes.
struct OwnPiece {
  Slice slice;
  std::int64_t first = 0, count = 0;
  // These elements in host memory, as many as one checksum covers in each but the last; empty: the slice is asked for them.
  std::vector<at::Tensor> values{};
};

// What this rank is to write of what it holds, so that all ranks together write each element once, and those that hold the
// same elements write about as much each. No rank needs to ask another one.
BONFIRE_API std::vector<OwnPiece> own_pieces(std::vector<Slice> slices);
BONFIRE_API std::int64_t bytes_of(const std::vector<OwnPiece>& pieces);

// Host memory for one copy, kept for the next.
struct CopyMemory {
  bool pinned = false;  // to which a GPU copies as fast as the bus allows
  std::vector<at::Tensor> blocks{};
};
// The same pieces with values that stay as they are now, in `memory`, which is made anew where it is too small.
BONFIRE_API std::vector<OwnPiece> copied(const std::vector<OwnPiece>& pieces, CopyMemory& memory);

// "rank-00003.safetensors", and what is told about it until there is a manifest.
BONFIRE_API std::string rank_file_name(int rank);
BONFIRE_API std::string rank_pieces_name(int rank);

// Writes both files into the folder, where they survive a loss of power. Calls `between` after some MiB each. Throws
// WriteError.
BONFIRE_API void write_rank_file(const std::filesystem::path& folder, int rank, const std::vector<OwnPiece>& pieces,
                                 const std::function<void()>& between = {});

}  // namespace bonfire
