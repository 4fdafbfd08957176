#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
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
    std::optional<double> staleness{};  // in updates, where steps overlap: the most of any stage
    std::vector<int> stale_stages{};    // the same by stage
    std::optional<double> seconds{};    // that it took, where that is not from one reading to the next
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

  struct StepContext {
    std::int64_t step = 1;
    std::int64_t first_sample = 0;       // number of this rank's first sample in the batch of all ranks
    const GradScaler* scaler = nullptr;  // scales the loss, where there is one
    std::int64_t rollbacks = 0;          // how often the run has gone back to a checkpoint
    Tracer& tracer;
  };
  // Gradients are those of the mean loss over the whole batch afterwards. Returns the mean loss over these microbatches: one
  // fp64 number on the device. Collective.
  virtual at::Tensor forward_backward(const std::vector<Batch>& microbatches, const StepContext& context) = 0;
  // A whole step, forward to update, that a device does without the host: it changes nothing where loss or gradients are not
  // finite. Nothing where this one must be taken in parts, by the two functions around this one. Collective.
  virtual std::shared_ptr<StepReading> whole_step(const std::vector<Batch>& /*microbatches*/, const StepContext& /*context*/,
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
  // --- Where steps overlap, a step begins before the updates of those before it are made.
  virtual bool overlaps() const { return false; }
  // How many steps are taken before the reading of one is read.
  virtual int readings_behind() const { return 1; }
  // Ends all steps that have begun; where it can, for it is not possible after every step. Collective.
  virtual bool can_drain() const { return true; }
  virtual void drain() {}
  // Called on each rank when its state is that after a step, and of no step behind it: ranks come there at different times.
  virtual void on_step_made(std::function<void(std::int64_t step)> /*made*/) {}
  struct Overlap {
    std::vector<int> staleness{};  // of updates, at most: by stage
    bool stash = true;
    std::int64_t drains = 0;
    double drain_seconds = 0;
    // Of one drain, on average: how much longer it and the filling after it take than the same minibatches in a full
    // pipeline. Nothing where it never was full.
    std::optional<double> seconds_lost{};
  };
  virtual std::optional<Overlap> overlap() const { return std::nullopt; }
  // Its parameters and buffers.
  virtual Sliced* parameters() = 0;
  // What a checkpoint keeps of it.
  virtual std::vector<Sliced*> state() = 0;
};

}  // namespace bonfire
