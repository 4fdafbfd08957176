#pragma once

#include "bonfire/plan/model.h"

namespace bonfire::plan {

// The blocks keep nothing for backward, but the last of those that follow each other: what it has made. Each makes its input
// again, and one of its two parts at a time, with all that this one would have kept.
void make_reversible(ModelDescription& model);

// Whether a Unit is a block of a reversible model, and whether the one after it is none.
bool is_reversible(const ModelDescription& model, std::size_t unit);
bool ends_reversible(const ModelDescription& model, std::size_t unit);

}  // namespace bonfire::plan
