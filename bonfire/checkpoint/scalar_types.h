#pragma once

#include <c10/core/ScalarType.h>

#include "bonfire/base/api.h"
#include "bonfire/checkpoint/safetensors.h"

namespace bonfire {

// Throws Error for a type that the files do not have.
BONFIRE_API StoredType stored_type(at::ScalarType type);
BONFIRE_API at::ScalarType scalar_type(StoredType type);

}  // namespace bonfire
