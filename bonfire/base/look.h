#pragma once

#include <filesystem>
#include <vector>

#include "bonfire/base/api.h"

// Looking at files that may be another user's. Each throws ConfigError with the path and the system's reason where it
// cannot tell: a folder that may not be searched is not one without files.
namespace bonfire {

// Links count as what they point to.
BONFIRE_API bool is_there(const std::filesystem::path& path);
BONFIRE_API bool is_folder(const std::filesystem::path& path);

// Everything in a folder; nothing where there is no such folder.
BONFIRE_API std::vector<std::filesystem::path> entries_of(const std::filesystem::path& folder);

// Throws unless this process may read every file in the folder.
BONFIRE_API void require_readable(const std::filesystem::path& folder);

}  // namespace bonfire
