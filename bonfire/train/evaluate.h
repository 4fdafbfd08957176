#pragma once

#include "bonfire/train/build.h"

namespace bonfire {

// Mean loss over the first train.eval_batches batches of the held-out data: the same samples each time, whatever the layout.
// Collective.
double evaluate(Run& run);

}  // namespace bonfire
