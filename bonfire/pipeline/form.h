#pragma once

#include <cstdint>
#include <vector>

#include "bonfire/pipeline/chain.h"

namespace bonfire {

// What the shapes of all values follow from that a microbatch becomes on its way through the stages: those of its inputs,
// for one sample. Every rank of a pipeline knows it, and shapes of one form are agreed on once.
using Form = std::vector<std::int64_t>;

Form form_of(const Microbatch& microbatch);

}  // namespace bonfire
