#pragma once

#include "bonfire/checkpoint/checkpoints.h"
#include "tests/support/small_training.h"

namespace bonfire::testing {

struct SavedTraining : SmallTraining {
  using SmallTraining::SmallTraining;
  CheckpointContents contents() { return {.tensors = {&*engine, &*optimizer}}; }
};

}  // namespace bonfire::testing
