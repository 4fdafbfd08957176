#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>

#include "bonfire/base/api.h"
#include "bonfire/train/build.h"
#include "bonfire/train/config.h"

// Runs that train low-rank adapters over the weights of another run, and what becomes of these adapters.
namespace bonfire {

inline bool has_adapters(const Config& config) { return config.model.spec.adapter.rank > 0; }

// Throws ConfigError where [adapter] does not go with the other keys, or adapter.weights is of other adapters: before
// anything starts. REQUIRES: the model is resolved.
BONFIRE_API void check_adapters(const Config& config);
// Throws ConfigError where a checkpoint was saved over other weights than those of checkpoint.weights, all of which are
// read.
BONFIRE_API void require_same_base(const Config& config, const std::filesystem::path& checkpoint);

// What adapter.weights has; nothing where it is empty. Collective.
void load_adapters(Run& run);

// Writes the adapters of a checkpoint as PEFT's folder `to`.
BONFIRE_API void export_adapters(const std::filesystem::path& checkpoint, const std::filesystem::path& to);

struct MergeOptions {
  // A checkpoint of the weights below the adapters; empty: where they were when the adapters were saved.
  std::filesystem::path base{};
  std::function<void(std::uint64_t bytes)> progress{};
};
// Writes a checkpoint of the base's weights with the adapters in them, without optimizer state. `adapters` is a checkpoint,
// or a folder of PEFT's, which needs a base. Returns how many weights have changed. Throws ConfigError where the base is not
// the one that the adapters were saved over.
BONFIRE_API int merge_adapters(const std::filesystem::path& adapters, const std::filesystem::path& to,
                               const MergeOptions& options);

// The base that a checkpoint of adapters names, or the one that is given, where it is a complete checkpoint.
BONFIRE_API std::filesystem::path base_for_merge(const std::filesystem::path& adapters, const MergeOptions& options);

}  // namespace bonfire
