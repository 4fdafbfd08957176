#pragma once

#include <filesystem>

#include "bonfire/base/api.h"
#include "bonfire/train/config.h"

namespace bonfire {

// Makes `folder/name`, or `folder/name-2`, `-3`, ... where it exists, and points the link `folder/name-latest` to it. Two
// runs that start together get two folders. Throws ConfigError where it cannot be made.
BONFIRE_API std::filesystem::path make_run_folder(const Config& config);

}  // namespace bonfire
