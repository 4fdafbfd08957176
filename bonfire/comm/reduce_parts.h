#pragma once

#include <span>

#include <ATen/core/Tensor.h>

#include "bonfire/base/api.h"
#include "bonfire/comm/backend.h"

namespace bonfire {

// The reduction of equal parts on the CPU, element by element in the order of the parts, so that its bits depend on nothing
// else: one pass over memory, on all threads of the caller. bf16 and fp16 are summed in fp32 and rounded once. Each part
// holds as many elements of the output's dtype as the output, which may be one of them.
BONFIRE_API void reduce_parts(const at::Tensor& output, std::span<const void* const> parts, Reduce op);

}  // namespace bonfire
