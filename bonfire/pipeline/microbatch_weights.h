#pragma once

#include <vector>

#include "bonfire/pipeline/chain.h"

namespace bonfire {

// What microbatches weigh in the mean over all of them.
struct MicrobatchWeights {
  std::vector<double> each;  // parts of the whole; all 0 where nothing weighs anything
  double total = 0;          // of what was said, or of samples
  bool said = false;         // by the microbatches themselves
};

// Throws Error where some are said and others are not, where one cannot be, and where samples would weigh alike though
// targets are masked.
MicrobatchWeights weights_of(const std::vector<Microbatch>& microbatches);

}  // namespace bonfire
