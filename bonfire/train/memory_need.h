#pragma once

#include <string>

#include "bonfire/base/api.h"
#include "bonfire/train/config.h"

// What a configuration needs of a rank's memory, in words. All of it REQUIRES: config is resolved.
namespace bonfire {

// "2 replicas x shard 2 (parameters); a rank holds 1.20 MiB of model state, 3.41 MiB at its peak (predicted)".
BONFIRE_API std::string layout_line(const Config& config);

// Throws ConfigError where a rank would need more than run.memory_cap: how many bytes, and what would fit.
BONFIRE_API void require_memory(const Config& config);

// Throws Error for an allocation that was refused although the prediction had promised enough. `refused`: by whom, and what.
[[noreturn]] BONFIRE_API void fail_for_memory(const Config& config, const std::string& refused);

}  // namespace bonfire
