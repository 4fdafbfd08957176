#pragma once

#include <filesystem>
#include <optional>
#include <string>

#include "bonfire/base/api.h"
#include "bonfire/train/config.h"

namespace bonfire {

// Makes `folder/name`, or `folder/name-2`, `-3`, ... where it exists, and points the link `folder/name-latest` to it. Two
// runs that start together get two folders. Throws ConfigError where it cannot be made.
BONFIRE_API std::filesystem::path make_run_folder(const Config& config);

// The newest of this name; nothing where there is none.
BONFIRE_API std::optional<std::filesystem::path> latest_run_folder(const Config& config);

// In the folder stands which launch has made it: ranks that this one starts again go on there, and those of no other.
BONFIRE_API void sign_run_folder(const std::filesystem::path& folder, const std::string& launch);
// The newest of this name that the launch has signed; nothing where there is none.
BONFIRE_API std::optional<std::filesystem::path> run_folder_of(const Config& config, const std::string& launch);
// The file in which that stands.
inline constexpr const char* launch_file = "launch";

// Undoes that, for a run that could not be started: the folder and what is in it goes, and the link, where it points there,
// points to the run before again.
BONFIRE_API void discard_run_folder(const Config& config, const std::filesystem::path& folder);

}  // namespace bonfire
