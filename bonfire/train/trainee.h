#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include "bonfire/data/loader.h"
#include "bonfire/optim/grad_scaler.h"
#include "bonfire/optim/optimizer.h"
#include "bonfire/train/tracer.h"

namespace bonfire {

// What a step has come to, on its way from the device.
class StepReading {
 public:
  virtual ~StepReading() = default;
  struct Values {
    double own_loss = 0;       // mean over this rank's part of the batch
    double sum_of_losses = 0;  // of all data-parallel ranks
    double gradient_norm = 0;
  };
  // Host: waits until it is there.
  virtual Values read() = 0;
  // Whether the step was captured before, and not issued anew.
  virtual bool replayed() const = 0;
};

// What a rank trains: a whole model under an engine, or its stages of one in a pipeline.
class Trainee {
 public:
  virtual ~Trainee() = default;

  struct Pass {
    std::int64_t step = 1;
    std::int64_t first_sample = 0;       // number of this rank's first sample in the batch of all ranks
    const GradScaler* scaler = nullptr;  // scales the loss, where there is one
    Tracer& tracer;
  };
  // Gradients are those of the mean loss over the whole batch afterwards. Returns the mean loss over these microbatches: one
  // fp64 number on the device. Collective.
  virtual at::Tensor forward_backward(const std::vector<Batch>& microbatches, const Pass& pass) = 0;
  // A whole step, forward to update, that a device does without the host: it changes nothing where loss or gradients are not
  // finite. Nothing where this one must be taken in parts, by the two functions around this one. Collective.
  virtual std::shared_ptr<StepReading> whole_step(const std::vector<Batch>& /*microbatches*/, const Pass& /*pass*/,
                                                  const StepOptions& /*options*/) {
    return nullptr;
  }
  // Collective.
  virtual StepResult update(const StepOptions& options) = 0;
  virtual void spend_gradients() = 0;
  virtual void set_lr(double lr) = 0;
  // Forwards alone. Two fp64 numbers on the device: the losses of the samples of the first `counted` microbatches, summed,
  // and how many samples these are. Collective.
  virtual at::Tensor evaluate(const std::vector<Batch>& microbatches, std::size_t counted) = 0;
};

}  // namespace bonfire
