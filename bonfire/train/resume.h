#pragma once

#include <filesystem>
#include <string>

#include "bonfire/base/api.h"
#include "bonfire/train/config.h"

// Going on with what an earlier run has saved.
namespace bonfire {

struct Resume {
  std::filesystem::path run_folder{};  // the run that goes on, in the same folder; empty: a run of its own
  std::filesystem::path checkpoint{};  // that it begins with
};

// What a user means by "latest", the newest run of this name; by a run's folder; or by a checkpoint's, with which a run of
// its own begins. Throws ConfigError where there is no checkpoint.
BONFIRE_API Resume find_resume(const Config& config, const std::string& said);

// What is looked at before anything starts: the manifest of a checkpoint, or its files as well, as far as that is quick.
// Where each of many ranks looks for itself, the manifest has to do; they share the files when they load them.
enum class LookAt { manifest, files };

// The folder of a run's checkpoints.
BONFIRE_API std::filesystem::path checkpoints_of(const std::filesystem::path& run_folder);

// Throws ConfigError that names the key where something is set that may not change between the run that has saved and this
// one. `saved` is the configuration of the other, as TOML; `name` stands for the checkpoint. REQUIRES: config is resolved.
BONFIRE_API void require_resumable(const Config& config, const std::string& saved, const std::string& name);
// The same for the checkpoint that `resume` names; of a run's, for the newest that is not broken, of which there must be
// one.
BONFIRE_API void require_resumable(const Config& config, const Resume& resume, LookAt look);

// The same for the folder in which the ranks of a run are started again, for what it is going on from. It may have saved
// nothing yet, or have come to its end.
BONFIRE_API void require_restartable(const Config& config, const std::filesystem::path& run_folder);

}  // namespace bonfire
