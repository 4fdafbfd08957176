#pragma once

#include <cstdint>
#include <string_view>

#include "bonfire/base/api.h"

namespace bonfire::plan {

// Number formats as the arithmetic knows them.
enum class Dtype { fp64, fp32, bf16, fp16, fp8 };

BONFIRE_API std::int64_t bytes_of(Dtype dtype);
BONFIRE_API const char* name_of(Dtype dtype);
// Throws ConfigError for another name than fp64, fp32, bf16, fp16, fp8.
BONFIRE_API Dtype dtype_of(std::string_view name);

}  // namespace bonfire::plan
