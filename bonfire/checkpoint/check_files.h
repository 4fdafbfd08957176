#pragma once

#include <filesystem>
#include <map>
#include <string>

#include "bonfire/base/api.h"
#include "bonfire/checkpoint/manifest.h"

namespace bonfire {

struct FilesToCheck {
  int first = 0, every = 1;  // of all files, by name: ranks share them
};

// What is wrong with the files that the manifest names, by their names, without a look at their data: one that is missing,
// cut short or may not be read, or whose header does not say of its tensors what the manifest says. Other readers know no
// manifest.
BONFIRE_API std::map<std::string, std::string> problems_of_files(const std::filesystem::path& checkpoint,
                                                                 const Manifest& manifest, const FilesToCheck& which = {});

// Throws BrokenCheckpoint with the first of them.
BONFIRE_API void check_files(const std::filesystem::path& checkpoint, const Manifest& manifest,
                             const FilesToCheck& which = {});

}  // namespace bonfire
