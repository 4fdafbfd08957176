#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "bonfire/base/api.h"
#include "bonfire/comm/group.h"
#include "bonfire/kernels/optimizer.h"
#include "bonfire/optim/conveyor.h"
#include "bonfire/optim/share_state.h"
#include "bonfire/shard/engine_ref.h"

namespace bonfire {

class Engine;
class FlatParameter;
class GradScaler;

// What some parameters get in place of the optimizer's own values. The first rule that matches a parameter decides.
struct ParameterRule {
  std::function<bool(const std::string& name, const at::Tensor& parameter)> matches;
  double lr_factor = 1;  // multiplies the learning rate
  double weight_decay = 0;
};

// Norms and biases: everything with fewer than two dimensions goes without weight decay.
BONFIRE_API ParameterRule no_decay_below_two_dims();

struct StepOptions {
  double clip = 0;               // gradients longer than this, over all parameters, are shortened to it; 0: never
  double clip_value = 0;         // before that, each element is limited to [-clip_value, clip_value]; 0: never
  GradScaler* scaler = nullptr;  // the loss was scaled by it
  bool skip_non_finite = false;  // a step whose gradients hold NaN or infinity changes nothing
};

struct StepResult {
  // Of all gradients, after `clip_value` and before `clip`; NaN where nobody asked (no clip, no scaler, no skipping).
  double gradient_norm = std::numeric_limits<double>::quiet_NaN();
  bool skipped = false;
};

// Other parts of the same model, whose gradients count in its norm.
struct ModelParts {
  Group ranks{};  // that hold them, each this one's peer: those along a pipeline
  // Whether a buffer is a copy of another part's, whose gradient counts there.
  std::function<bool(const Engine& engine, const FlatParameter& flat)> is_copy{};
};

// Updates the flat parameters of an engine: of each, the share that is this rank's own. Where masters lie on the host the
// update is done there, on all cores, while gradients come from the device and new values go back.
class BONFIRE_API Optimizer {
 public:
  virtual ~Optimizer() = default;
  Optimizer(const Optimizer&) = delete;
  Optimizer& operator=(const Optimizer&) = delete;

  // Uses the gradients, then declares them spent. All ranks decide alike, since the norm is of all ranks' shares.
  // Collective where shares are divided: the norm, where somebody asked, and the new values where others hold copies.
  StepResult step(const StepOptions& options = {});
  // The same for optimizers of several parts of one model: one norm, one decision. Collective over `parts.ranks` as well.
  static StepResult step_together(std::span<Optimizer* const> optimizers, const StepOptions& options,
                                  const ModelParts& parts);

  // --- A step that the device decides alone, so that it can be captured once and done again and again.
  // The same work as `step` with skip_non_finite, without the host: returns the norm, one fp64 element on the device.
  // Nothing changes where that or `loss`, one element, is not finite. Learning rate and number of the step are read from
  // memory on the device that prepare_on_device writes. REQUIRES: prepare_on_device was called since the engine's layout
  // last changed. Collective.
  at::Tensor step_on_device(const StepOptions& options, const at::Tensor& loss);
  // Stream: what comes after it and was made by step_on_device is the step that comes next. `unknown`: the device may not
  // have done the step before, or done it without changing anything; told_by_device has not been called for it.
  void prepare_on_device(bool unknown);
  // Whether a step of the device, the oldest that was not told yet, has changed something.
  void told_by_device(bool changed) { steps_ += changed ? 1 : 0; }

  double lr() const { return lr_; }
  void set_lr(double lr) { lr_ = lr; }
  // Steps that changed something.
  std::int64_t steps() const { return steps_; }
  // Bytes of state on this rank.
  std::int64_t state_bytes() const { return state_.bytes(); }

 protected:
  // One pass of an update: a part of a share whose segments have one setting.
  struct Range {
    at::Tensor master, gradient, low_precision;
    std::vector<at::Tensor> state;  // in the order of state_names
    double lr = 0, weight_decay = 0, gradient_scale = 1;
    std::int64_t step = 1;  // of these parameters: 1 for their first
    // Where the device decides: what multiplies gradient_scale (not a number: no change), and `numbers` instead of all
    // above.
    at::Tensor scale_on_device{}, numbers_on_device{};
  };

  struct Common {
    double lr = 1e-3;
    double weight_decay = 0;
    std::vector<ParameterRule> rules{};
  };

  Optimizer(Engine& engine, Common common, std::vector<std::string> state_names);

  // Stream: the current one.
  virtual void update(std::span<const Range> ranges) = 0;
  // What it multiplies with.
  virtual StepNumbers numbers(const Range& range) const = 0;

 private:
  Engine& engine() const { return engine_.get(); }

  // A stretch of a share, in elements of the share, whose segments share their settings.
  struct Setting {
    double lr_factor = 1, weight_decay = 0;
    std::int64_t began = 0;
    bool operator==(const Setting&) const = default;
  };
  struct Stretch {
    std::int64_t begin = 0, length = 0;
    Setting setting{};
  };
  Setting setting_of(const std::string& name, const at::Tensor& parameter) const;
  std::vector<Stretch> stretches_of(std::size_t flat, std::size_t share) const;
  void follow_engine();
  void add_ranges(std::size_t flat, double gradient_scale, std::vector<Range>& ranges) const;
  void update_all(double gradient_scale);

  // What steps of the device read.
  struct OnDevice {
    std::vector<Setting> settings{};  // all different ones
    at::Tensor table{};               // [2, settings, step_numbers]: for a step after one that changed nothing, or something
    at::Tensor changed{};             // whether the last one did: 0 or 1
    at::Tensor numbers{}, scale{};    // of the step that is being issued
  };

  EngineRef engine_;
  std::vector<std::string> state_names_;
  double lr_, weight_decay_;
  std::vector<ParameterRule> rules_;
  std::int64_t steps_ = 0;
  ShareState state_;
  std::vector<std::vector<std::vector<Stretch>>> stretches_;  // by flat and share
  Conveyor conveyor_;
  OnDevice device_;
};

struct AdamOptions {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0;
  bool amsgrad = false;
  bool maximize = false;
  std::vector<ParameterRule> rules{};
};

// Adam as published: weight decay is added to the gradient.
class BONFIRE_API Adam : public Optimizer {
 public:
  Adam(Engine& engine, const AdamOptions& options = {}) : Adam(engine, options, false) {}

 protected:
  Adam(Engine& engine, const AdamOptions& options, bool decoupled);
  void update(std::span<const Range> ranges) override;
  StepNumbers numbers(const Range& range) const override;

 private:
  AdamStep step_of(const Range& range) const;

  AdamOptions options_;
  bool decoupled_;
};

// Adam with decoupled weight decay.
class BONFIRE_API AdamW : public Adam {
 public:
  AdamW(Engine& engine, const AdamOptions& options = {.weight_decay = 0.01}) : Adam(engine, options, true) {}
};

struct SgdOptions {
  double lr = 1e-3;
  double momentum = 0;
  double dampening = 0;
  double weight_decay = 0;
  bool nesterov = false;
  bool maximize = false;
  std::vector<ParameterRule> rules{};
};

class BONFIRE_API Sgd : public Optimizer {
 public:
  Sgd(Engine& engine, const SgdOptions& options = {});

 protected:
  void update(std::span<const Range> ranges) override;
  StepNumbers numbers(const Range& range) const override;

 private:
  SgdStep step_of(const Range& range) const;

  SgdOptions options_;
};

}  // namespace bonfire
