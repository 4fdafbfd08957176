#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "bonfire/base/api.h"
#include "bonfire/base/error.h"
#include "bonfire/base/json.h"
#include "bonfire/base/stateful.h"
#include "bonfire/checkpoint/safetensors.h"
#include "bonfire/plan/box.h"

// What a checkpoint says about itself: the file manifest.json in its folder. docs/checkpoints.md describes it for whoever
// writes a reader.
namespace bonfire {

// Each change of the format, also a new key, has a version of its own. What is written is of the newest; all since 1 are
// read.
inline constexpr std::int64_t manifest_version = 2;
inline constexpr const char* manifest_name = "manifest.json";
// Of how many bytes of a piece there is one checksum each; its last part may be shorter.
inline constexpr std::uint64_t checksum_bytes = std::uint64_t{4} << 20;

// What a checkpoint should hold is not there, or not what was written: the file is named.
class BONFIRE_API BrokenCheckpoint : public ConfigError {
 public:
  using ConfigError::ConfigError;
};

// Part of a tensor, and where it is.
struct StoredPiece {
  Piece piece{};
  std::string file;    // in the checkpoint's folder
  std::string tensor;  // by which name that file has it
  std::uint64_t offset = 0;
  std::vector<std::string> checksums{};  // as checksum_of() writes them

  bool operator==(const StoredPiece&) const = default;
};

struct ManifestTensor {
  std::string name;  // in the whole model; empty: of no parameter in particular
  std::string kind;  // "value", "buffer", "exp_avg", ...
  StoredType type = StoredType::f32;
  Shape shape{};
  std::vector<StoredPiece> pieces{};  // all of the tensor, each element once

  bool operator==(const ManifestTensor&) const = default;
};

struct BONFIRE_API Manifest {
  std::int64_t step = 0;      // of the last step that is in it
  std::string configuration;  // of the run, as TOML; empty: a program's own
  std::map<std::string, State> states{};
  std::vector<ManifestTensor> tensors{};

  const ManifestTensor* find(std::string_view name, std::string_view kind) const;  // null: it is not there
  bool operator==(const Manifest&) const = default;
};

// Throws Error where it would have more than `most` bytes: read_manifest() reads no larger one.
BONFIRE_API std::string to_json(const Manifest& manifest, std::uint64_t most = most_json_bytes);
// Throws BrokenCheckpoint that names what is wrong: names of files outside of the folder, pieces that overlap or are
// missing, sizes that overflow, a text that is not the one that was saved; another ConfigError where it is of a newer
// version. `name` stands for the file in messages.
BONFIRE_API Manifest parse_manifest(std::string_view text, const std::string& name);
// Of a checkpoint's folder. Throws like parse_manifest, also where the folder has none.
BONFIRE_API Manifest read_manifest(const std::filesystem::path& folder);

// What each rank says about its own file, before there is a manifest.
BONFIRE_API std::string pieces_to_json(const std::vector<ManifestTensor>& tensors);
BONFIRE_API std::vector<ManifestTensor> parse_pieces(std::string_view text, const std::string& name);
// All ranks' pieces, by tensor. Throws Error where ranks differ about a tensor, or some of it was said twice or by nobody.
BONFIRE_API std::vector<ManifestTensor> merge_pieces(const std::vector<std::vector<ManifestTensor>>& of_ranks);

// XXH3 with 64 bits, as 16 hexadecimal digits.
BONFIRE_API std::string checksum_of(std::span<const std::byte> bytes);

}  // namespace bonfire
