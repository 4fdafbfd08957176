#pragma once

#include <filesystem>
#include <string>

#include "bonfire/base/api.h"
#include "bonfire/train/config.h"

namespace bonfire {

// Makes `folder/name`, or `folder/name-2`, `-3`, ... where it exists, and points the link `folder/name-latest` to it. Two
// runs that start together get two folders. Throws ConfigError where it cannot be made.
BONFIRE_API std::filesystem::path make_run_folder(const Config& config);

// Writes a file so that a reader finds either all of it or nothing.
BONFIRE_API void write_file(const std::filesystem::path& file, const std::string& content);

}  // namespace bonfire
