#pragma once

#include <cstdint>

#include "bonfire/train/build.h"
#include "bonfire/train/tracer.h"

// The parts of one optimizer step, in the order in which the loop calls them.
namespace bonfire {

// Throws where the data ends before the run does.
StepBatches next_batches(Run& run, Tracer& tracer);

struct StepLoss {
  double mine = 0;  // mean over this rank's part of the batch
  double mean = 0;  // over the whole batch
};

// Collective: gradients are the average over the whole batch afterwards.
StepLoss forward_backward(Run& run, const StepBatches& batches, std::int64_t step, Tracer& tracer);

// Changes the parameters, unless the loss or a gradient is not finite: then the gradients are spent and nothing changes. All
// ranks decide alike, because loss and gradients are the same on all.
StepResult update_parameters(Run& run, const StepLoss& loss, Tracer& tracer);

// What train.nan_policy says about a step that was not finite: nothing, or Error with the same words on all ranks.
// Collective.
void enforce_nan_policy(const Run& run, std::int64_t step, const StepLoss& loss, const StepResult& update);

}  // namespace bonfire
