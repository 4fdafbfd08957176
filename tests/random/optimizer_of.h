#pragma once

#include <memory>

#include "bonfire/optim/optimizer.h"
#include "tests/random/update.h"

namespace bonfire::cases {

// The optimizer of ours that a case asks for.
std::unique_ptr<Optimizer> optimizer_of(const Update& update, Shares& shares);

}  // namespace bonfire::cases
