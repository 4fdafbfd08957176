#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "bonfire/base/api.h"
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

// A step, and what it has come to once that is known.
struct StepTaken {
  std::int64_t step = 0;
  double lr = 0;
  StepLoss loss{};
  StepResult update{};
  std::optional<double> staleness{}, seconds{};
  std::vector<int> stale_stages{};
  std::shared_ptr<StepReading> reading{};  // of a step that the device may not have ended
};

// Forward, backward, and an update of the parameters by gradients that are the average over the whole batch, unless the loss
// or a gradient is not finite: then the gradients are spent and nothing changes. All ranks decide alike, because loss and
// gradients are the same on all. Collective.
BONFIRE_API StepTaken take_step(Run& run, const StepBatches& batches, std::int64_t step, Tracer& tracer);

// What it has come to. Host: waits where the device has not ended it.
BONFIRE_API void read(const Run& run, StepTaken& taken);

// What train.nan_policy says about a step that was not finite. True: the run goes on. False: it goes back to its newest
// checkpoint. Or Error, which ends it. The same on all ranks, with the same words. Collective.
bool enforce_nan_policy(const Run& run, const StepTaken& taken);

}  // namespace bonfire
